package sql_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// pooler starts pgbouncer in transaction mode in front of the test server.
func pooler(t *testing.T, size int) *servers.PgBouncer {
	t.Helper()
	bouncer, err := servers.StartPgBouncer(context.Background(), testdb.PostgreSQLURL(t), size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bouncer.Stop(); err != nil {
			t.Error(err)
		}
	})
	return bouncer
}

// A pooler in transaction mode carries no session state, so nothing may rely on any.
func TestBehindPgBouncer(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 2} {
		bouncer := pooler(t, size)
		for name, open := range map[string]func() (*sql.DB, error){
			"lib-pq": func() (*sql.DB, error) { return sql.Open("postgres", bouncer.URL()) },
			"lib-pq, binary parameters": func() (*sql.DB, error) {
				return sql.Open("postgres", bouncer.URL()+"&binary_parameters=yes")
			},
			"lib-pq, fused": func() (*sql.DB, error) {
				connector, err := pq.NewConnector(bouncer.URL())
				if err != nil {
					return nil, err
				}
				fused, err := inboxpq.NewConnector(connector)
				if err != nil {
					return nil, err
				}
				return sql.OpenDB(fused), nil
			},
			// Pgx caches prepared statements for the handler's queries unless it is told not to.
			"pgx": func() (*sql.DB, error) { return sql.Open("pgx", bouncer.URL()+"&default_query_exec_mode=exec") },
		} {
			t.Run(fmt.Sprintf("%d server connections, %s", size, name), func(t *testing.T) {
				db := testdb.PostgreSQL(t, "postgres")
				var schema string
				if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
					t.Fatal(err)
				}
				db.Repository(t, inboxsql.Options{})
				pool, err := open()
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = pool.Close() })
				pool.SetMaxOpenConns(8)
				pool.SetMaxIdleConns(8)
				behindPooler(t, db, pool, schema)
			})
		}
	}
}

// behindPooler sends 2,000 messages, a tenth of them duplicates, through two repositories with four workers
// each, and counts.
func behindPooler(t *testing.T, db *testdb.Database, pool *sql.DB, schema string) {
	t.Helper()
	const messages, duplicates = 2000, 200
	work := make(chan string)
	var runs atomic.Int32
	var group sync.WaitGroup
	for range 2 {
		repository, err := inboxsql.NewRepository(pool, inboxsql.Options{SchemaAdapter: db.Adapter, Table: schema + ".watermill_inbox"})
		if err != nil {
			t.Fatal(err)
		}
		handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
			runs.Add(1)
			tx, _ := inboxsql.TxFromContext(msg.Context())
			_, err := tx.ExecContext(msg.Context(), `INSERT INTO `+schema+`.effects (effect) VALUES ($1)`, msg.UUID)
			return err
		})
		for range 4 {
			group.Add(1)
			go func() {
				defer group.Done()
				for id := range work {
					if _, err := handler(newMessage(id)); err != nil {
						t.Errorf("message %s: %v", id, err)
					}
				}
			}()
		}
	}
	for i := range messages {
		work <- fmt.Sprint(i % (messages - duplicates))
	}
	close(work)
	group.Wait()
	if got := runs.Load(); got != messages-duplicates {
		t.Errorf("the handler ran %d times, want %d", got, messages-duplicates)
	}
	if got := db.Count(t, `SELECT count(*) FROM effects`); got != messages-duplicates {
		t.Errorf("%d effects, want %d", got, messages-duplicates)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != messages-duplicates {
		t.Errorf("%d claims, want %d", got, messages-duplicates)
	}
}
