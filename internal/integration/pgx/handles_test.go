package pgx_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// queries has the shape of what sqlc generates for pgx/v5.
type queries struct{ db dbtx }

type dbtx interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
	Query(context.Context, string, ...any) (pgx.Rows, error)
	QueryRow(context.Context, string, ...any) pgx.Row
	CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error)
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}

func newQueries(db dbtx) *queries { return &queries{db: db} }

func (q *queries) WithTx(tx pgx.Tx) *queries { return &queries{db: tx} }

func (q *queries) InsertEffect(ctx context.Context, effect string) (string, error) {
	var got string
	err := q.db.QueryRow(ctx, `INSERT INTO effects (effect) VALUES ($1) RETURNING effect`, effect).Scan(&got)
	return got, err
}

func (q *queries) ListEffects(ctx context.Context) ([]string, error) {
	rows, err := q.db.Query(ctx, `SELECT effect FROM effects`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var effects []string
	for rows.Next() {
		var effect string
		if err := rows.Scan(&effect); err != nil {
			return nil, err
		}
		effects = append(effects, effect)
	}
	return effects, rows.Err()
}

func wantEqual[T comparable](got, want T, err error) error {
	if err == nil && got != want {
		err = fmt.Errorf("got %v, want %v", got, want)
	}
	return err
}

// What pgx's transaction can do, and what people use on top of it, works in the handler and rolls back
// with it.
func TestHandlesOnTheTransaction(t *testing.T) {
	t.Parallel()
	for name, effect := range map[string]func(ctx context.Context, db *database, tx pgx.Tx, effect string) error{
		"sqlc": func(ctx context.Context, db *database, tx pgx.Tx, effect string) error {
			generated := newQueries(db.pool).WithTx(tx)
			if _, err := generated.InsertEffect(ctx, effect); err != nil {
				return err
			}
			got, err := generated.ListEffects(ctx)
			return wantEqual(fmt.Sprint(got), fmt.Sprint([]string{effect}), err)
		},
		"CopyFrom": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			n, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"effect"}, pgx.CopyFromRows([][]any{{effect}}))
			return wantEqual(n, 1, err)
		},
		"SendBatch": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			batch := &pgx.Batch{}
			batch.Queue(`INSERT INTO effects (effect) VALUES ($1)`, effect)
			var count int
			batch.Queue(`SELECT count(*) FROM effects`).QueryRow(func(row pgx.Row) error { return row.Scan(&count) })
			err := tx.SendBatch(ctx, batch).Close()
			return wantEqual(count, 1, err)
		},
		"Prepare": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			if _, err := tx.Prepare(ctx, "insert effect", `INSERT INTO effects (effect) VALUES ($1)`); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "insert effect", effect)
			return err
		},
		"nested Begin": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := nested.Exec(ctx, `INSERT INTO effects VALUES ('undone')`); err != nil {
				return err
			}
			if _, err := nested.Exec(ctx, `SELECT 1 / 0`); err == nil {
				return errors.New("no error")
			}
			if err := nested.Rollback(ctx); err != nil {
				return err
			}
			if _, err := nested.Exec(ctx, `SELECT 1`); !errors.Is(err, pgx.ErrTxClosed) {
				return fmt.Errorf("the ended nested transaction answers %v", err)
			}
			return pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				return pgx.BeginFunc(ctx, nested, func(nested pgx.Tx) error {
					_, err := nested.Exec(ctx, `INSERT INTO effects VALUES ($1)`, effect)
					return err
				})
			})
		},
		"LargeObjects": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			objects := tx.LargeObjects()
			oid, err := objects.Create(ctx, 0)
			if err != nil {
				return err
			}
			object, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
			if err != nil {
				return err
			}
			if _, err := io.WriteString(object, effect); err != nil {
				return err
			}
			if _, err := object.Seek(0, io.SeekStart); err != nil {
				return err
			}
			got, err := io.ReadAll(object)
			if err := wantEqual(string(got), effect, err); err != nil {
				return err
			}
			if err := object.Close(); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `INSERT INTO effects SELECT convert_from(lo_get($1), 'UTF8')`, oid); err != nil {
				return err
			}
			return objects.Unlink(ctx, oid)
		},
		"Conn": func(ctx context.Context, _ *database, tx pgx.Tx, effect string) error {
			_, err := tx.Conn().Exec(ctx, `INSERT INTO effects VALUES ($1)`, effect)
			return err
		},
		"watermill-sql's publisher": func(ctx context.Context, db *database, tx pgx.Tx, effect string) error {
			schema := watermillsql.DefaultPostgreSQLSchema{GeneratePayloadType: func(string) string { return "BYTEA" }}
			initialize, err := schema.SchemaInitializingQueries(watermillsql.SchemaInitializingQueriesParams{Topic: "events"})
			if err != nil {
				return err
			}
			for _, query := range initialize {
				if _, err := tx.Exec(ctx, query.Query, query.Args...); err != nil {
					return err
				}
			}
			outbox, err := watermillsql.NewPublisher(watermillsql.TxFromPgx(tx), watermillsql.PublisherConfig{SchemaAdapter: schema}, watermill.NopLogger{})
			if err != nil {
				return err
			}
			if err := outbox.Publish("events", message.NewMessage(effect, []byte("booked"))); err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `INSERT INTO effects SELECT uuid FROM watermill_events`)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, oneConnection) // none of them may ask for a second one
			ctx := context.Background()
			fails := true
			handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
				if err := effect(msg.Context(), db, handlerTx(msg.Context()), msg.UUID); err != nil {
					t.Error(err)
				}
				if fails {
					return errors.New("fails after it")
				}
				return nil
			})
			if _, err := handler(newMessage("1")); err == nil {
				t.Fatal("no error")
			}
			if got, _ := db.Effects(ctx); len(got) != 0 {
				t.Fatalf("effects %q survived the rollback", got)
			}
			fails = false
			for range 3 {
				if _, err := handler(newMessage("1")); err != nil {
					t.Fatal(err)
				}
			}
			if got, _ := db.Effects(ctx); len(got) != 1 || got[0] != "1" {
				t.Fatalf("effects %q, want one", got)
			}
			if got := db.pool.Stat().NewConnsCount(); got != 1 {
				t.Errorf("%d connections were opened, want one", got)
			}
		})
	}
}

// ContextWithTx is enough to test a handler without a router, and the innermost transaction counts.
func TestContextWithTx(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	background := context.Background()
	tx, err := db.pool.Begin(background)
	if err != nil {
		t.Fatal(err)
	}
	ctx := inboxpgx.ContextWithTx(background, tx)
	if got, ok := inboxpgx.TxFromContext(ctx); !ok || got != tx {
		t.Fatalf("found %v, %v", got, ok)
	}
	if err := write(ctx, "1"); err != nil {
		t.Fatal(err)
	}
	handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
		if inner, ok := inboxpgx.TxFromContext(msg.Context()); !ok || inner == tx {
			t.Error("the handler does not find the claim's transaction")
		}
		return nil
	})
	if _, err := handler(message.NewMessageWithContext(ctx, "1", nil)); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(background); err != nil {
		t.Fatal(err)
	}
	if got, _ := db.Effects(background); len(got) != 0 {
		t.Fatalf("effects %q", got)
	}
	if _, ok := inboxpgx.TxFromContext(background); ok {
		t.Fatal("found a transaction in an empty context")
	}
}
