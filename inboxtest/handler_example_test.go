package inboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/lib/pq"

	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// bookPayment is a handler as in production.
func bookPayment(msg *message.Message) ([]*message.Message, error) {
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return nil, errors.New("the inbox middleware is missing")
	}
	if _, err := tx.ExecContext(msg.Context(), `INSERT INTO payments (id) VALUES ($1)`, msg.UUID); err != nil {
		return nil, err
	}
	return []*message.Message{message.NewMessage("booked-"+msg.UUID, []byte("booked"))}, nil
}

// payments is the State function: all that the handler writes, in a fixed order.
func payments(db *sql.DB) func(context.Context) (string, error) {
	return func(ctx context.Context) (ids string, err error) {
		rows, err := db.QueryContext(ctx, `SELECT id FROM payments ORDER BY id`)
		if err != nil {
			return "", err
		}
		defer rows.Close()
		for rows.Next() {
			var id string
			if err := rows.Scan(&id); err != nil {
				return "", err
			}
			ids += id + "\n"
		}
		return ids, rows.Err()
	}
}

// PostgreSQL. Each fault starts from an empty table, because the constructor empties it.
func ExampleTestHandler() {
	test := func(t *testing.T) { // func TestBookPayment(t *testing.T)
		inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
			db, err := sql.Open("postgres", "postgres://localhost/shop_test")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
			if err != nil {
				t.Fatal(err)
			}
			if err := repository.InitializeSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS payments (id text); TRUNCATE payments, watermill_inbox`); err != nil {
				t.Fatal(err)
			}
			return inboxtest.Handler{
				Repository: repository,
				Handle:     bookPayment,
				Message:    message.NewMessage("payment-7", []byte(`{"cents": 100}`)),
				State:      payments(db),
			}
		})
	}
	_ = test
}

// SQLite. Each fault has a file of its own.
func ExampleTestHandler_sQLite() {
	test := func(t *testing.T) { // func TestBookPayment(t *testing.T)
		inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
			// With the driver of modernc.org/sqlite.
			db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "test.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultSQLiteSchema{}})
			if err != nil {
				t.Fatal(err)
			}
			if err := repository.InitializeSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			if _, err := db.Exec(`CREATE TABLE payments (id text)`); err != nil {
				t.Fatal(err)
			}
			return inboxtest.Handler{
				Repository: repository,
				Handle:     bookPayment,
				Message:    message.NewMessage("payment-7", []byte(`{"cents": 100}`)),
				State:      payments(db),
			}
		})
	}
	_ = test
}
