package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// ending is a way in which a handler ends its transaction.
type ending struct {
	end       func(ctx context.Context, exec func(context.Context, string, ...any) error) error
	committed bool // what was written before it
	chained   bool // another transaction takes its place
}

func endingText(text string) func(context.Context, func(context.Context, string, ...any) error) error {
	return func(ctx context.Context, exec func(context.Context, string, ...any) error) error {
		return exec(ctx, text)
	}
}

var endings = map[string]ending{
	"Commit": {committed: true, end: func(ctx context.Context, _ func(context.Context, string, ...any) error) error {
		if tx, ok := inboxpgx.TxFromContext(ctx); ok {
			return tx.Commit(ctx)
		}
		return handlerTx(ctx, (*sql.Tx).Commit)
	}},
	"Rollback": {end: func(ctx context.Context, _ func(context.Context, string, ...any) error) error {
		if tx, ok := inboxpgx.TxFromContext(ctx); ok {
			return tx.Rollback(ctx)
		}
		return handlerTx(ctx, (*sql.Tx).Rollback)
	}},
	"COMMIT":             {committed: true, end: endingText("COMMIT")},
	"ROLLBACK":           {end: endingText("ROLLBACK")},
	"COMMIT; BEGIN":      {committed: true, chained: true, end: endingText("COMMIT; BEGIN")},
	"COMMIT AND CHAIN":   {committed: true, chained: true, end: endingText("COMMIT AND CHAIN")},
	"ROLLBACK AND CHAIN": {chained: true, end: endingText("ROLLBACK AND CHAIN")},
}

// leavings are the ways in which it then leaves. Each has a text that the error must have, too.
var leavings = map[string]struct {
	leave func() error
	says  string
}{
	"nil":      {func() error { return nil }, ""},
	"an error": {func() error { return errors.New("the handler's own") }, "the handler's own"},
	"a panic":  {func() error { panic("the handler's panic") }, "the handler's panic"},
}

// A handler that ends its transaction runs once, however it leaves: tried again it would find its own claim, and what it
// had still to do would be lost as a duplicate's, or it would do twice what it has committed.
func TestAHandlerThatEndsItsTransactionIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	for name, e := range endings {
		for how := range leavings {
			for _, way := range append([]string{"SQLite"}, testdb.Ways...) {
				if e.chained && (way == "postgres" || way == "SQLite" && strings.HasSuffix(name, "CHAIN")) {
					continue // see TestPlainLibPQDoesNotNoticeAChain; SQLite has no such thing
				}
				t.Run(fmt.Sprintf("%s, then %s, %s", name, how, way), func(t *testing.T) {
					t.Parallel()
					db, service := openWay(t, way)
					runs, err := endAndLeave(t, service, e, how)
					if runs != 1 {
						t.Errorf("the handler ran %d times, want once", runs)
					}
					if !errors.Is(err, inbox.ErrTransactionBroken) || !inbox.ShouldPoison(err) || inbox.ShouldRetry(middleware.RetryParams{Err: err}) {
						t.Fatalf("the error is %v, want a permanent ErrTransactionBroken", err)
					}
					if !strings.Contains(err.Error(), leavings[how].says) {
						t.Errorf("the error hides what the handler said: %v", err)
					}
					says := "the claim is rolled back"
					effects := []string(nil)
					if e.committed {
						says, effects = "are committed: a copy of the message is a duplicate", []string{"1"}
					}
					if !strings.Contains(err.Error(), says) {
						t.Errorf("the error is %v, want it to say %q", err, says)
					}
					(&app{t: t, db: db}).wantEffects(effects...)
					if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != len(effects) {
						t.Errorf("%d claims, want %d", got, len(effects))
					}
					// The connection, the only one, is fit for use or gone.
					handler := wrap(t, service, inbox.Options{}, func(msg *message.Message) error {
						return service.Exec(msg.Context(), `INSERT INTO effects (effect) VALUES ($1)`, msg.UUID)
					})
					for _, id := range []string{"1", "2"} {
						if _, err := handler(newMessage(id)); err != nil {
							t.Fatal(err)
						}
					}
					(&app{t: t, db: db}).wantEffects("1", "2")
				})
			}
		}
	}
}

// Plain lib/pq can tell that its connection is in no transaction, but not that it is in another one than before: that
// would cost a round trip per message. So a handler that replaces its transaction by text is not noticed, and what it
// returns counts: nil acknowledges what it may have rolled back, and what it has committed is a duplicate when it is tried
// again. The fused connector and pgx notice.
func TestPlainLibPQDoesNotNoticeAChain(t *testing.T) {
	t.Parallel()
	for name, e := range endings {
		if !e.chained {
			continue
		}
		for how := range leavings {
			t.Run(name+", then "+how, func(t *testing.T) {
				t.Parallel()
				db, service := openWay(t, "postgres")
				runs, err := endAndLeave(t, service, e, how)
				wantRuns := 1
				if how != "nil" && !e.committed {
					wantRuns = 1 + retries
				}
				if runs != wantRuns {
					t.Errorf("the handler ran %d times, want %d", runs, wantRuns)
				}
				if acknowledged := how == "nil" || e.committed; (err == nil) != acknowledged || errors.Is(err, inbox.ErrTransactionBroken) {
					t.Errorf("the error is %v, acknowledged should be %v", err, acknowledged)
				}
				if kept := db.Count(t, `SELECT count(*) FROM watermill_inbox`); (kept == 1) != e.committed {
					t.Errorf("%d claims", kept)
				}
			})
		}
	}
}

// openWay opens a pool of one connection.
func openWay(t testing.TB, way string) (*testdb.Database, testdb.Way) {
	t.Helper()
	if way == "SQLite" {
		db := testdb.SQLite(t)
		db.SetMaxOpenConns(1)
		return db, testdb.Way{Repository: db.Repository(t, inboxsql.Options{}), Exec: func(ctx context.Context, statement string, args ...any) error {
			return handlerTx(ctx, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, statement, args...)
				return err
			})
		}}
	}
	db := testdb.PostgreSQL(t, "postgres")
	service := db.Way(t, way, db.URL, 1)
	if err := service.InitializeSchema(context.Background()); err != nil {
		t.Fatal(err)
	}
	return db, service
}

// retries is how often Retry tries again.
const retries = 3

// endAndLeave handles the message 1 behind Watermill's Retry with a handler that writes, ends its transaction and leaves,
// and returns how often the handler ran and the error.
func endAndLeave(t testing.TB, service testdb.Way, e ending, how string) (runs int, err error) {
	t.Helper()
	handler := wrap(t, service, inbox.Options{}, func(msg *message.Message) error {
		runs++
		if err := service.Exec(msg.Context(), `INSERT INTO effects (effect) VALUES ($1)`, msg.UUID); err != nil {
			return err
		}
		if err := e.end(msg.Context(), service.Exec); err != nil {
			return err
		}
		return leavings[how].leave()
	})
	retry := middleware.Retry{MaxRetries: retries, InitialInterval: time.Millisecond, Multiplier: 1, ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err = retry.Middleware(middleware.Recoverer(handler))(message.NewMessageWithContext(ctx, "1", nil))
	return runs, err
}
