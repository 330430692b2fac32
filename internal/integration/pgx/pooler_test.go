package pgx_test

import (
	"context"
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
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// Field case 40: nothing of a session is relied upon, so a transaction-mode pooler may stand in between. The
// handler's statements must be sent unprepared, or as text, by itself.
func TestBehindPgBouncer(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 2} {
		bouncer, err := servers.StartPgBouncer(context.Background(), testdb.PostgreSQLURL(t), size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := bouncer.Stop(); err != nil {
				t.Error(err)
			}
		})
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
			t.Run(fmt.Sprintf("%d server connections, %s", size, mode), func(t *testing.T) {
				db := newDatabase(t)
				db.repository(t, inboxpgx.Options{})
				var schema string
				if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
					t.Fatal(err)
				}
				through := newDatabaseOn(t, &testdb.Database{DB: db.DB, URL: bouncer.URL()}, func(config *pgxpool.Config) {
					config.MaxConns = 8
					config.ConnConfig.DefaultQueryExecMode = mode
				})
				behindPooler(t, through, schema)
			})
		}
	}
}

// behindPooler sends 2,000 messages, a tenth of them duplicates, through two repositories with four workers
// each, and counts.
func behindPooler(t *testing.T, db *database, schema string) {
	t.Helper()
	const messages, duplicates = 2000, 200
	work := make(chan string)
	var runs atomic.Int32
	var group sync.WaitGroup
	for range 2 {
		repository, err := inboxpgx.NewRepository(db.pool, inboxpgx.Options{Table: schema + ".watermill_inbox"})
		if err != nil {
			t.Fatal(err)
		}
		handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
			runs.Add(1)
			_, err := handlerTx(msg.Context()).Exec(msg.Context(), `INSERT INTO `+schema+`.effects (effect) VALUES ($1)`, pgx.QueryExecModeExec, msg.UUID)
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
