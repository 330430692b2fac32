package pgx_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// wantHealthy fails the test unless the next ten messages are processed.
func wantHealthy(t testing.TB, handler message.HandlerFunc) {
	t.Helper()
	for i := range 10 {
		if _, err := handler(newMessage(fmt.Sprint("healthy-", i))); err != nil {
			t.Fatalf("message %d after it: %v", i, err)
		}
	}
}

// wantKept fails the test unless so many claims and effects of a message are committed.
func (d *database) wantKept(t testing.TB, id string, claims, effects int) {
	t.Helper()
	if got := d.Count(t, `SELECT count(*) FROM watermill_inbox WHERE message_id = $1`, id); got != claims {
		t.Errorf("%d claims of %s are kept, want %d", got, id, claims)
	}
	if got := d.Count(t, `SELECT count(*) FROM effects WHERE effect = $1`, id); got != effects {
		t.Errorf("%d effects of %s are kept, want %d", got, id, effects)
	}
}

// What a handler does to its transaction is told apart from what happens to it, costs no effect, and
// leaves the pool, which has one connection, fit for the next message.
func TestHandlersThatBreakTheTransaction(t *testing.T) {
	t.Parallel()
	exec := func(text string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, text)
			return err
		}
	}
	for name, c := range map[string]struct {
		do          func(ctx context.Context, tx pgx.Tx) error
		wantErr     error // beside ErrTransactionBroken
		committed   bool
		connections int64 // opened in all
	}{
		"ROLLBACK as text":     {do: exec("ROLLBACK"), wantErr: pgx.ErrTxClosed, connections: 1},
		"COMMIT as text":       {do: exec("COMMIT"), wantErr: pgx.ErrTxClosed, committed: true, connections: 1},
		"COMMIT in a long one": {do: exec("SELECT 1; COMMIT; SELECT 2"), wantErr: pgx.ErrTxClosed, committed: true, connections: 1},
		"ROLLBACK, BEGIN and an INSERT as text": {do: func(ctx context.Context, tx pgx.Tx) error {
			for _, text := range []string{`ROLLBACK`, `BEGIN`, `INSERT INTO effects VALUES ('1')`} {
				_, _ = tx.Exec(ctx, text)
			}
			return nil
		}, wantErr: pgx.ErrTxClosed, connections: 1},
		"Rollback": {do: func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }, wantErr: pgx.ErrTxClosed, connections: 1},
		"Commit":   {do: func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }, wantErr: pgx.ErrTxClosed, committed: true, connections: 1},
		"a swallowed error": {do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, `SELECT 1 / 0`)
			return nil
		}, wantErr: pgx.ErrTxCommitRollback, connections: 1},
		"a deferred constraint": {do: exec(`CREATE TEMPORARY TABLE parents (id int PRIMARY KEY) ON COMMIT DROP;
			CREATE TEMPORARY TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP;
			INSERT INTO children VALUES (1)`), wantErr: &pgconn.PgError{Code: "23503"}, connections: 1},
		"open rows": {do: func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`)
			rows.Next()
			return err
		}, connections: 2},
		"open rows and a statement": {do: func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, `SELECT generate_series(1, 100000)`)
			rows.Next()
			if _, err := tx.Exec(ctx, `INSERT INTO effects VALUES ('unread')`); err == nil || !inbox.ShouldPoison(err) {
				return fmt.Errorf("the statement beside open rows: %w", err)
			}
			return nil
		}, connections: 2},
		"an open batch": {do: func(ctx context.Context, tx pgx.Tx) error {
			batch := &pgx.Batch{}
			batch.Queue(`SELECT 1`)
			tx.SendBatch(ctx, batch)
			return nil
		}, connections: 2},
	} {
		for _, produces := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, produces %v", name, produces), func(t *testing.T) {
				t.Parallel()
				db := newDatabase(t, oneConnection)
				breaks := true
				handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
					if err := write(msg.Context(), msg.UUID); err != nil || !breaks {
						return err
					}
					return c.do(msg.Context(), handlerTx(msg.Context()))
				})
				if produces {
					handler = storing(t, db, &breaks, c.do)
				}
				_, err := handler(newMessage("1"))
				if !errors.Is(err, inbox.ErrTransactionBroken) || !inbox.ShouldPoison(err) {
					t.Fatalf("the error is %v, want it to match ErrTransactionBroken", err)
				}
				var pgErr *pgconn.PgError
				if want, coded := c.wantErr.(*pgconn.PgError); coded {
					if !errors.As(err, &pgErr) || pgErr.Code != want.Code {
						t.Errorf("the driver's error is hidden: %v", err)
					}
				} else if c.wantErr != nil && !produces && !errors.Is(err, c.wantErr) {
					t.Errorf("the error is %v, want it to match %v", err, c.wantErr)
				}
				// Only who has ended the transaction is not tried again.
				if ended := c.wantErr == pgx.ErrTxClosed; inbox.ShouldRetry(middleware.RetryParams{Err: err}) == ended {
					t.Errorf("tried again: %v, of %v", !ended, err)
				}
				kept := 0
				if c.committed {
					kept = 1
					if !strings.Contains(err.Error(), "are committed") {
						t.Errorf("the error does not say that the claim is committed: %v", err)
					}
				}
				db.wantKept(t, "1", kept, kept)
				if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 0 {
					t.Errorf("%d records have stored messages", got)
				}
				breaks = false
				if _, err := handler(newMessage("1")); err != nil {
					t.Fatal(err)
				}
				db.wantKept(t, "1", 1, 1)
				wantHealthy(t, handler)
				if got := db.pool.Stat().NewConnsCount(); got != c.connections {
					t.Errorf("%d connections were opened, want %d", got, c.connections)
				}
			})
		}
	}
}

// storing is a handler by hand, which stores before it commits.
func storing(t testing.TB, db *database, breaks *bool, do func(context.Context, pgx.Tx) error) message.HandlerFunc {
	t.Helper()
	repository := db.repository(t, inboxpgx.Options{})
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := context.Background()
		transaction, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: msg.UUID}})
		if err != nil || record != nil {
			return nil, err
		}
		defer func() {
			if err := transaction.Rollback(); err != nil {
				t.Logf("rollback: %v", err)
			}
		}()
		handlerContext := inbox.ContextWithTransaction(ctx, transaction)
		if err := write(handlerContext, msg.UUID); err != nil {
			return nil, err
		}
		if !*breaks {
			return nil, transaction.Commit(ctx)
		}
		if err := do(handlerContext, handlerTx(handlerContext)); err != nil {
			return nil, err
		}
		if _, err := transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("{}")}); err != nil {
			return nil, &inbox.Error{Step: "store", Err: err}
		}
		if err := transaction.Commit(ctx); err != nil {
			return nil, &inbox.Error{Step: "commit", Err: err}
		}
		return nil, nil
	}
}

func TestPanicsAndGoexitLeakNothing(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(ctx context.Context, tx pgx.Tx){
		"panic":  func(context.Context, pgx.Tx) { panic("boom") },
		"Goexit": func(context.Context, pgx.Tx) { runtime.Goexit() },
		"panic between rows": func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, `SELECT generate_series(1, 100000)`)
			rows.Next()
			panic("boom")
		},
		"panic inside of the transaction's method": func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `SELECT $1`, panicking{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, oneConnection)
			leaves := true
			handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
				if err := write(msg.Context(), msg.UUID); err != nil {
					return err
				}
				if leaves {
					leave(msg.Context(), handlerTx(msg.Context()))
				}
				return nil
			})
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				_, err := handler(newMessage("1"))
				t.Errorf("it came back: %v", err)
			}()
			<-done
			db.wantKept(t, "1", 0, 0)
			leaves = false
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatal(err)
			}
			wantHealthy(t, handler)
		})
	}
}

// panicking rewrites a query, inside of pgx.
type panicking struct{}

func (panicking) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	panic("boom")
}

func TestCancellationAroundCommit(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection)
	var cancel context.CancelFunc
	handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
		err := write(context.WithoutCancel(msg.Context()), msg.UUID)
		if strings.HasPrefix(msg.UUID, "cancelled") {
			go cancel()
		}
		return err
	})
	acked := 0
	for i := range 500 {
		ctx, stop := context.WithCancel(context.Background())
		cancel = stop
		msg := message.NewMessageWithContext(ctx, fmt.Sprint("cancelled-", i), nil)
		if _, err := handler(msg); err == nil {
			acked++
		} else if !errors.Is(err, context.Canceled) {
			t.Fatalf("the error does not match the context's: %v", err)
		}
		stop()
		if _, err := handler(newMessage(fmt.Sprint("next-", i))); err != nil {
			t.Fatalf("the message after a cancelled one: %v", err)
		}
	}
	effects := db.Count(t, `SELECT count(*) FROM effects WHERE effect LIKE 'cancelled%'`)
	claims := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE message_id LIKE 'cancelled%'`)
	t.Logf("%d of 500 acknowledged, %d effects, %d claims, %d connections", acked, effects, claims, db.pool.Stat().NewConnsCount())
	if effects != claims || acked != effects {
		t.Fatalf("%d acknowledged, %d effects, %d claims", acked, effects, claims)
	}
	if got := db.Count(t, `SELECT count(DISTINCT effect) FROM effects`); got != effects+500 {
		t.Fatalf("%d effects are distinct", got)
	}
}

// The server gives the claim free as soon as the context ends, whatever the handler does then.
func TestEndedContextReleasesTheClaim(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]func(background context.Context, tx pgx.Tx, released <-chan struct{}){
		"the handler computes": func(_ context.Context, _ pgx.Tx, released <-chan struct{}) { <-released },
		"a statement runs that does not know the context": func(background context.Context, tx pgx.Tx, _ <-chan struct{}) {
			_, _ = tx.Exec(background, `SELECT pg_sleep(60)`)
		},
		"rows are read": func(background context.Context, tx pgx.Tx, released <-chan struct{}) {
			rows, _ := tx.Query(background, `SELECT repeat('x', 1000) FROM generate_series(1, 100000)`)
			defer rows.Close()
			for rows.Next() {
				select {
				case <-released:
					return
				case <-time.After(time.Millisecond):
				}
			}
		},
		"a batch runs whose results are not read": func(background context.Context, tx pgx.Tx, released <-chan struct{}) {
			batch := &pgx.Batch{}
			batch.Queue(`SELECT pg_sleep(60)`)
			results := tx.SendBatch(background, batch)
			<-released
			_ = results.Close()
		},
		"the handler goes on": func(background context.Context, tx pgx.Tx, released <-chan struct{}) {
			for {
				select {
				case <-released:
					return
				default:
					_, _ = tx.Exec(background, `INSERT INTO effects VALUES ('late')`)
					var one int
					_ = tx.QueryRow(background, `SELECT 1`).Scan(&one)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, func(config *pgxpool.Config) {
				config.MaxConns = 1
				// A prepared statement's text is not seen by the test.
				config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
			})
			repository := db.repository(t, inboxpgx.Options{})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			entered, released := make(chan struct{}), make(chan struct{})
			held := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
				close(entered)
				hold(context.Background(), handlerTx(msg.Context()), released)
				return nil
			})
			failed := make(chan error, 1)
			go func() {
				_, err := held(message.NewMessageWithContext(ctx, "1", nil))
				failed <- err
			}()
			<-entered
			time.Sleep(50 * time.Millisecond) // so that the statement runs
			cancel()
			started := time.Now()
			// On the only connection of the pool, while the handler has not returned.
			handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return write(msg.Context(), msg.UUID) })
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatalf("the copy: %v", err)
			}
			took := time.Since(started)
			close(released)
			if err := <-failed; !errors.Is(err, context.Canceled) || inbox.ShouldPoison(err) {
				t.Fatalf("the error is %v, want it to match context.Canceled", err)
			}
			t.Logf("released after %s", took)
			if took > patience/3 {
				t.Errorf("the claim was released after %s", took)
			}
			db.wantKept(t, "1", 1, 1)
			db.wantKept(t, "late", 0, 0)
			wantHealthy(t, handler)
		})
	}
}

// A goroutine that a handler has left behind cannot reach the connection, which is somebody else's.
func TestLeakedGoroutineCannotReachTheConnection(t *testing.T) {
	t.Parallel()
	// The goroutine uses the transaction in all ways; stop ends it and returns its last errors.
	use := func(tx pgx.Tx) (stop func() []error) {
		stopped, last := make(chan struct{}), make(chan []error)
		go func() {
			ctx := context.Background()
			nested, nestedErr := tx.Begin(ctx)
			for {
				_, execErr := tx.Exec(ctx, `INSERT INTO effects VALUES ('late')`)
				rows, queryErr := tx.Query(ctx, `SELECT 1`)
				rows.Close()
				_, copyErr := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"effect"}, pgx.CopyFromRows([][]any{{"late"}}))
				_, beginErr := tx.Begin(ctx)
				_, prepareErr := tx.Prepare(ctx, "", `SELECT 1`)
				batch := &pgx.Batch{}
				batch.Queue(`INSERT INTO effects VALUES ('late')`)
				errs := []error{
					execErr, queryErr, rows.Err(), copyErr, beginErr, prepareErr, tx.SendBatch(ctx, batch).Close(),
					tx.QueryRow(ctx, `SELECT 1`).Scan(new(int)), tx.Commit(ctx), tx.Rollback(ctx),
				}
				if nestedErr == nil {
					_, err := nested.Exec(ctx, `INSERT INTO effects VALUES ('late')`)
					errs = append(errs, err, nested.Commit(ctx))
				}
				select {
				case <-stopped:
					last <- errs
					return
				default:
				}
			}
		}()
		return func() []error {
			close(stopped)
			return <-last
		}
	}
	t.Run("after the transaction's end", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t, oneConnection)
		var kept pgx.Tx
		handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
			kept = handlerTx(msg.Context())
			return write(msg.Context(), msg.UUID)
		})
		if _, err := handler(newMessage("1")); err != nil {
			t.Fatal(err)
		}
		stop := use(kept)
		wantHealthy(t, handler)
		for i, err := range stop() {
			if !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("method %d of a kept transaction answered %v, want ErrTxClosed", i, err)
			}
		}
		objects := kept.LargeObjects()
		if _, err := objects.Create(context.Background(), 0); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("its large objects answered %v", err)
		}
		db.wantKept(t, "late", 0, 0)
		if got := db.pool.Stat().NewConnsCount(); got != 1 {
			t.Errorf("%d connections were opened, want one", got)
		}
	})
	t.Run("while the transaction ends", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t, oneConnection)
		outcomes := map[string]int{}
		repository := db.repository(t, inboxpgx.Options{})
		for i := range 60 {
			id := fmt.Sprint("message-", i)
			var stop func() error
			_, err := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
				if err := write(msg.Context(), msg.UUID); err != nil {
					return err
				}
				tx, started := handlerTx(msg.Context()), make(chan struct{})
				stopped, last := make(chan struct{}), make(chan error)
				go func() {
					close(started)
					for {
						_, _ = tx.Exec(context.Background(), `SELECT 1`)
						select {
						case <-stopped:
							_, err := tx.Exec(context.Background(), `INSERT INTO effects VALUES ('late')`)
							last <- err
							return
						default:
						}
					}
				}()
				stop = func() error {
					close(stopped)
					return <-last
				}
				<-started
				if i%3 == 0 {
					return errors.New("the handler fails")
				}
				return nil
			})(newMessage(id))
			switch {
			case err == nil:
				outcomes["committed"]++
			case errors.Is(err, inbox.ErrTransactionBroken):
				outcomes["refused"]++
			default:
				outcomes["failed"]++
			}
			committed := 0
			if err == nil {
				committed = 1
			}
			db.wantKept(t, id, committed, committed)
			if stop() == nil {
				t.Fatal("a kept transaction still works")
			}
		}
		t.Logf("%v", outcomes)
		wantHealthy(t, wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return write(msg.Context(), msg.UUID) }))
	})
	t.Run("in the middle of a long statement", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t, oneConnection)
		var group sync.WaitGroup
		leaks := true
		handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
			if !leaks {
				return write(msg.Context(), msg.UUID)
			}
			tx := handlerTx(msg.Context())
			group.Add(1)
			go func() {
				defer group.Done()
				_, _ = tx.Exec(context.Background(), `SELECT pg_sleep(60)`)
			}()
			time.Sleep(100 * time.Millisecond)
			return nil
		})
		started := time.Now()
		if _, err := handler(newMessage("1")); !errors.Is(err, inbox.ErrTransactionBroken) {
			t.Fatalf("the error is %v", err)
		}
		group.Wait()
		if took := time.Since(started); took > patience/3 {
			t.Fatalf("it took %s", took)
		}
		db.wantKept(t, "1", 0, 0)
		leaks = false
		wantHealthy(t, handler)
	})
}

// Re-entering is an error, as in pgx, and not a deadlock.
func TestReenteringTheTransaction(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection)
	handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
		ctx, tx := msg.Context(), handlerTx(msg.Context())
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"effect"}, pgx.CopyFromFunc(func() ([]any, error) {
			return nil, tx.QueryRow(ctx, `SELECT 1`).Scan(new(int))
		}))
		return err
	})
	if _, err := handler(newMessage("1")); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatalf("the error is %v", err)
	}
}

// An answer that is cut, anywhere, is no success, and the pool's only connection is replaced. A lost claim
// is tried again on another connection: nothing of it was committed.
func TestCutInTheMiddleOfAnAnswer(t *testing.T) {
	t.Parallel()
	for name, request := range map[string]string{
		"begin and the claim": "ON CONFLICT",
		"the record":          "LEFT JOIN",
		"the handler's row":   "SELECT repeat",
		"the commit":          "commit",
		"the rollback":        "rollback",
	} {
		for _, after := range []int{0, 3, 12} {
			t.Run(fmt.Sprintf("%s after %d bytes", name, after), func(t *testing.T) {
				t.Parallel()
				direct := testdb.PostgreSQL(t, "postgres")
				proxy := testproxy.New(t, direct.Address(t))
				through := direct.Through(t, proxy.Address())
				db := newDatabaseOn(t, &testdb.Database{DB: direct.DB, URL: through.URL, Adapter: direct.Adapter, Driver: direct.Driver}, oneConnection)
				handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
					tx := handlerTx(msg.Context())
					var text string
					// The comment makes pgx send the text each time, instead of a prepared statement's name.
					if err := tx.QueryRow(msg.Context(), `SELECT repeat('x', 100) -- `+msg.UUID).Scan(&text); err != nil {
						return err
					}
					if msg.UUID == "fails" {
						return errors.New("the handler fails")
					}
					return write(msg.Context(), msg.UUID)
				})
				if _, err := handler(newMessage("warm up")); err != nil {
					t.Fatal(err)
				}
				cut := proxy.CutAnswer(request, after)
				id := map[string]string{"the record": "warm up", "the rollback": "fails"}[name]
				if id == "" {
					id = "cut"
				}
				_, err := handler(newMessage(id))
				select {
				case <-cut:
				default:
					t.Fatalf("nothing was cut; the error is %v", err)
				}
				switch name {
				case "begin and the claim", "the record":
					if err != nil {
						t.Fatalf("the claim was not tried again: %v", err)
					}
				default:
					if err == nil {
						t.Fatal("the cut message was acknowledged")
					}
					if id == "cut" && inbox.ShouldPoison(err) {
						t.Fatalf("it would be poisoned: %v", err)
					}
				}
				wantHealthy(t, handler)
				if _, err := handler(newMessage("cut")); err != nil {
					t.Fatalf("the redelivery: %v", err)
				}
				db.wantKept(t, "cut", 1, 1)
			})
		}
	}
}

func TestSessionKilledUnderTheHandler(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{"idle, then returns", "idle, then swallows a statement's error", "terminated, then goes on", "terminated, then returns the second error"} {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, oneConnection, func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "200"
			})
			ctx := context.Background()
			first := true
			handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
				if !first {
					return write(msg.Context(), msg.UUID)
				}
				first = false
				pid := handlerTx(msg.Context()).Conn().PgConn().PID()
				if strings.HasPrefix(variant, "terminated") {
					db.MustExec(t, `SELECT pg_terminate_backend($1)`, pid)
				}
				eventually(t, "the session has ended", func() bool {
					return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
				})
				if variant == "idle, then returns" {
					return nil
				}
				_ = write(msg.Context(), "lost")
				err := write(msg.Context(), "lost")
				if strings.HasSuffix(variant, "error") && strings.HasPrefix(variant, "terminated") {
					return err
				}
				return nil
			})
			_, err := handler(newMessage("1"))
			if err == nil {
				t.Fatal("the message was acknowledged")
			}
			if inbox.ShouldPoison(err) {
				t.Fatalf("it would be poisoned: %v", err)
			}
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatalf("the redelivery: %v", err)
			}
			if got, _ := db.Effects(ctx); len(got) != 1 || got[0] != "1" {
				t.Fatalf("effects %q", got)
			}
			wantHealthy(t, handler)
		})
	}
}

// The pool's connections are dead after a restart, and it does not know: they were used just before.
func TestServerRestart(t *testing.T) {
	t.Parallel()
	server, err := servers.StartPostgreSQL(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	db := newDatabaseOn(t, testdb.PostgreSQLAt(t, "postgres", server.URL()), func(config *pgxpool.Config) {
		config.MaxConns = 2
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	})
	handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error { return write(msg.Context(), msg.UUID) })
	for i := range 3 {
		var group sync.WaitGroup
		for worker := range 2 {
			group.Add(1)
			go func() {
				defer group.Done()
				if _, err := handler(newMessage(fmt.Sprint("before-", i, worker))); err != nil {
					t.Error(err)
				}
			}()
		}
		group.Wait()
		if err := server.Kill(); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			if _, err := handler(newMessage("meanwhile")); err == nil || inbox.ShouldPoison(err) {
				t.Fatalf("the error without a server is %v", err)
			}
		}
		if err := server.Restart(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := handler(newMessage(fmt.Sprint("after-", i))); err != nil {
			t.Fatalf("the first message after the restart: %v", err)
		}
	}
	eventually(t, "the test's own pool has healed", func() bool { return db.Ping() == nil })
	if got := db.Count(t, `SELECT count(*) FROM effects`); got != 9 {
		t.Fatalf("%d effects, want 9", got)
	}
	wantHealthy(t, handler)
}

// The server refuses a claim, or BEGIN itself: the connection stays in the pool.
func TestRefusedClaimKeepsTheConnection(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		isolation pgx.TxIsoLevel
		spoil     string
		wantCode  string
	}{
		"the claim":              {spoil: `ALTER TABLE watermill_inbox RENAME TO gone`, wantCode: "42P01"},
		"a trigger":              {spoil: `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no' USING ERRCODE = '40001'; END $$; CREATE TRIGGER refuse BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION refuse()`, wantCode: "40001"},
		"BEGIN":                  {isolation: "nonsense", wantCode: "42601"},
		"a trigger that ignores": {spoil: `CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; CREATE TRIGGER ignore BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION ignore()`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, oneConnection)
			repository := db.repository(t, inboxpgx.Options{TxOptions: pgx.TxOptions{IsoLevel: c.isolation}})
			if c.spoil != "" {
				db.MustExec(t, c.spoil)
			}
			for range 5 {
				_, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
				var pgErr *pgconn.PgError
				if c.wantCode == "" {
					if !errors.Is(err, inbox.ErrNoRecord) {
						t.Fatalf("the error is %v, want ErrNoRecord", err)
					}
				} else if !errors.As(err, &pgErr) || pgErr.Code != c.wantCode {
					t.Fatalf("the error is %v, want %s", err, c.wantCode)
				}
			}
			if got := db.pool.Stat().NewConnsCount(); got != 1 {
				t.Errorf("%d connections were opened, want one", got)
			}
		})
	}
}

// The record disappears between the claim and the look at it.
func TestRecordGoneInBetween(t *testing.T) {
	t.Parallel()
	var deletes atomic.Bool
	var db *database
	db = newDatabase(t, oneConnection, func(config *pgxpool.Config) {
		config.ConnConfig.Tracer = afterClaim(func() {
			if deletes.CompareAndSwap(true, false) {
				db.MustExec(t, `DELETE FROM watermill_inbox`)
			}
		})
	})
	runs := 0
	handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(*message.Message) error { runs++; return nil })
	for range 2 {
		if _, err := handler(newMessage("1")); err != nil {
			t.Fatal(err)
		}
	}
	deletes.Store(true)
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	if runs != 2 {
		t.Fatalf("the handler ran %d times, want 2", runs)
	}
}

// afterClaim is a tracer, which sees our statements as everybody's.
type afterClaim func()

func (afterClaim) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, afterClaim(nil).key(), data.SQL)
}

func (f afterClaim) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if sql, _ := ctx.Value(f.key()).(string); strings.Contains(sql, "ON CONFLICT") {
		f()
	}
}

func (afterClaim) key() any { return struct{ afterClaim string }{"sql"} }

// A handler's search path is not the inbox's, and a hook's transaction is not either.
func TestSessionOfStrangers(t *testing.T) {
	t.Parallel()
	t.Run("search path", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t, oneConnection)
		runs := 0
		handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(msg *message.Message) error {
			runs++
			_, err := handlerTx(msg.Context()).Exec(msg.Context(), `CREATE TEMPORARY TABLE IF NOT EXISTS watermill_inbox (); SET search_path TO pg_catalog`)
			return err
		})
		for _, id := range []string{"1", "1", "2", "2"} {
			if _, err := handler(newMessage(id)); err != nil {
				t.Fatal(err)
			}
		}
		if runs != 2 {
			t.Fatalf("the handler ran %d times", runs)
		}
	})
	t.Run("a hook's transaction", func(t *testing.T) {
		t.Parallel()
		var begins atomic.Bool
		db := newDatabase(t, oneConnection, func(config *pgxpool.Config) {
			config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
				if begins.Load() {
					_, err := conn.Exec(ctx, `BEGIN; INSERT INTO effects VALUES ('the hook''s')`)
					return true, err
				}
				return true, nil
			}
		})
		handler := wrap(t, db.repository(t, inboxpgx.Options{}), inbox.Options{}, func(*message.Message) error { return nil })
		if _, err := handler(newMessage("1")); err != nil {
			t.Fatal(err)
		}
		begins.Store(true)
		if _, err := handler(newMessage("2")); err == nil {
			t.Fatal("the claim joined a hook's transaction")
		}
		begins.Store(false)
		wantHealthy(t, handler)
		db.wantKept(t, "the hook's", 0, 0)
	})
}

// Bytes come back whatever the server's text format for them is.
func TestByteaOutputEscape(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["bytea_output"] = "escape"
		config.ConnConfig.RuntimeParams["standard_conforming_strings"] = "off"
	})
	repository := db.repository(t, inboxpgx.Options{})
	ctx, key, produced := context.Background(), inbox.Key{Consumer: "c", MessageID: `back\slash'`}, "\x00\\x'\xff"
	transaction, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte(produced)}); err != nil {
		t.Fatal(err)
	}
	if err := transaction.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	_, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	if record == nil || string(record.Produced) != produced {
		t.Errorf("the record is %v", record)
	}
}

// Waiting copies and a greedy handler are bounded, and the pool survives them.
func TestPoolExhaustionIsBounded(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection)
	repository := db.repository(t, inboxpgx.Options{})
	handler := wrap(t, repository, inbox.Options{ClaimTimeout: 2 * time.Second}, func(msg *message.Message) error {
		if msg.UUID == "greedy" {
			_, err := wrap(t, repository, inbox.Options{ClaimTimeout: 200 * time.Millisecond}, nil)(newMessage("inner"))
			if !errors.Is(err, inbox.ErrInFlight) {
				t.Errorf("the error is %v, want ErrInFlight", err)
			}
		}
		return write(msg.Context(), msg.UUID)
	})
	if _, err := handler(newMessage("greedy")); err != nil {
		t.Fatal(err)
	}
	wantHealthy(t, handler)
}
