package sql_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jmoiron/sqlx"
	"github.com/jmoiron/sqlx/reflectx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// queries has the shape of what sqlc generates.
type queries struct{ db dbtx }

type dbtx interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func newQueries(db dbtx) *queries { return &queries{db: db} }

func (q *queries) WithTx(tx *sql.Tx) *queries { return &queries{db: tx} }

func (q *queries) InsertEffect(ctx context.Context, effect string) error {
	_, err := q.db.ExecContext(ctx, `INSERT INTO effects (effect) VALUES ($1)`, effect)
	return err
}

// What people use on top of database/sql works on the handler's *sql.Tx, and rolls back with it.
func TestHandlesOnTheTransaction(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func(t *testing.T, db *testdb.Database) func(ctx context.Context, tx *sql.Tx, effect string) error{
		"sqlc": func(_ *testing.T, db *testdb.Database) func(context.Context, *sql.Tx, string) error {
			generated := newQueries(db.DB)
			return func(ctx context.Context, tx *sql.Tx, effect string) error {
				return generated.WithTx(tx).InsertEffect(ctx, effect)
			}
		},
		"sqlx": func(*testing.T, *testdb.Database) func(context.Context, *sql.Tx, string) error {
			mapper := reflectx.NewMapperFunc("db", strings.ToLower)
			return func(ctx context.Context, tx *sql.Tx, effect string) error {
				handle := &sqlx.Tx{Tx: tx, Mapper: mapper}
				if _, err := handle.ExecContext(ctx, `INSERT INTO effects (effect) VALUES ($1)`, effect); err != nil {
					return err
				}
				var got struct{ Effect string }
				return handle.GetContext(ctx, &got, `SELECT effect FROM effects WHERE effect = $1`, effect)
			}
		},
		"gorm": func(t *testing.T, db *testdb.Database) func(context.Context, *sql.Tx, string) error {
			pool, err := gorm.Open(postgres.New(postgres.Config{Conn: db.DB}), &gorm.Config{})
			if err != nil {
				t.Fatal(err)
			}
			type effect struct{ Effect string }
			return func(ctx context.Context, tx *sql.Tx, value string) error {
				handle := pool.Session(&gorm.Session{NewDB: true, SkipDefaultTransaction: true, Context: ctx})
				handle.Statement.ConnPool = tx
				return handle.Create(&effect{Effect: value}).Error
			}
		},
		"watermill-sql's publisher": func(t *testing.T, db *testdb.Database) func(context.Context, *sql.Tx, string) error {
			schema := watermillsql.DefaultPostgreSQLSchema{
				GenerateMessagesTableName: func(topic string) string { return "outbox_" + topic },
				GeneratePayloadType:       func(string) string { return "BYTEA" },
			}
			for _, query := range schema.SchemaInitializingQueries("events") {
				db.MustExec(t, query.Query)
			}
			db.MustExec(t, `DROP TABLE effects`)
			db.MustExec(t, `CREATE VIEW effects AS SELECT uuid AS effect FROM outbox_events`)
			return func(_ context.Context, tx *sql.Tx, effect string) error {
				outbox, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{SchemaAdapter: schema}, watermill.NopLogger{})
				if err != nil {
					return err
				}
				return outbox.Publish("events", message.NewMessage(effect, []byte("booked")))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.SetMaxOpenConns(1) // none of them may ask for a second connection
			do := write(t, db)
			fails := true
			handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
				tx, _ := inboxsql.TxFromContext(msg.Context())
				if err := do(msg.Context(), tx, msg.UUID); err != nil {
					return err
				}
				if fails {
					return context.DeadlineExceeded
				}
				return nil
			})
			if _, err := handler(newMessage("1")); err == nil {
				t.Fatal("no error")
			}
			if got, _ := db.Effects(context.Background()); len(got) != 0 {
				t.Fatalf("effects %q survived the rollback", got)
			}
			fails = false
			for range 3 {
				if _, err := handler(newMessage("1")); err != nil {
					t.Fatal(err)
				}
			}
			if got, _ := db.Effects(context.Background()); len(got) != 1 {
				t.Fatalf("effects %q, want one", got)
			}
		})
	}
}

// ContextWithTx is enough to test a handler without a router, and the innermost transaction counts.
func TestContextWithTx(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	ctx := inbox.ContextWithKey(inboxsql.ContextWithTx(context.Background(), tx), inbox.Key{Consumer: "c", MessageID: "1"})
	if got, ok := inboxsql.TxFromContext(ctx); !ok || got != tx {
		t.Fatalf("found %v, %v", got, ok)
	}
	if key, ok := inbox.KeyFromContext(ctx); !ok || key.MessageID != "1" {
		t.Fatalf("found %v, %v", key, ok)
	}
	if err := db.Write(ctx, "1"); err != nil {
		t.Fatal(err)
	}
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		if inner, ok := inboxsql.TxFromContext(msg.Context()); !ok || inner == tx {
			t.Error("the handler does not find the claim's transaction")
		}
		return nil
	})
	if _, err := handler(message.NewMessageWithContext(ctx, "2", nil)); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if got, _ := db.Effects(context.Background()); len(got) != 0 {
		t.Fatalf("effects %q", got)
	}
}
