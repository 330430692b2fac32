package pgx_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"

	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// A pooler in transaction mode carries no session state. 2,000 messages go through it, a tenth of them duplicates.
func TestBehindPgBouncer(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d server connections", size), func(t *testing.T) {
			bouncer, err := servers.StartPgBouncer(context.Background(), testdb.PostgreSQLURL(t), size)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := bouncer.Stop(); err != nil {
					t.Error(err)
				}
			})
			db := testdb.PostgreSQL(t, "postgres")
			db.Repository(t, inboxsql.Options{})
			var schema string
			if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
				t.Fatal(err)
			}
			config, err := pgxpool.ParseConfig(bouncer.URL())
			if err != nil {
				t.Fatal(err)
			}
			config.MaxConns = 8
			config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // for the handler's statements
			pool, err := pgxpool.NewWithConfig(context.Background(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{Table: schema + ".watermill_inbox"})
			if err != nil {
				t.Fatal(err)
			}
			once, err := inbox.NewMiddleware(repository, inbox.Options{Consumer: func(string) string { return "c" }})
			if err != nil {
				t.Fatal(err)
			}
			const messages, duplicates = 2000, 200
			var runs atomic.Int32
			handler := once.Middleware(func(msg *message.Message) ([]*message.Message, error) {
				runs.Add(1)
				tx, ok := inboxpgx.TxFromContext(msg.Context())
				if !ok {
					return nil, errors.New("no transaction")
				}
				_, err := tx.Exec(msg.Context(), `INSERT INTO `+schema+`.effects (effect) VALUES ($1)`, msg.UUID)
				return nil, err
			})
			work := make(chan string)
			var group sync.WaitGroup
			for range 8 {
				group.Add(1)
				go func() {
					defer group.Done()
					for id := range work {
						if _, err := handler(message.NewMessage(id, nil)); err != nil {
							t.Errorf("message %s: %v", id, err)
						}
					}
				}()
			}
			for i := range messages {
				work <- fmt.Sprint(i % (messages - duplicates))
			}
			close(work)
			group.Wait()
			for what, got := range map[string]int{
				"runs":    int(runs.Load()),
				"effects": db.Count(t, `SELECT count(*) FROM effects`),
				"claims":  db.Count(t, `SELECT count(*) FROM watermill_inbox`),
			} {
				if got != messages-duplicates {
					t.Errorf("%d %s, want %d", got, what, messages-duplicates)
				}
			}
		})
	}
}
