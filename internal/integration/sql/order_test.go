package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// newPostgreSQLApp is an app on lib/pq, with a pool of one connection, so that a leaked one is noticed.
func newPostgreSQLApp(t *testing.T) *app {
	t.Helper()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(1)
	return newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
}

func TestPanicIsPoisonedAfterTheRetries(t *testing.T) {
	t.Parallel()
	a := newPostgreSQLApp(t)
	a.router.AddMiddleware(a.order()...)
	var runs atomic.Int32
	a.handle("book", "payments", func(msg *message.Message) error {
		if err := a.db.Write(msg.Context(), msg.UUID); err != nil {
			return err
		}
		if msg.UUID == "bad" {
			runs.Add(1)
			panic("boom")
		}
		return nil
	})
	a.run()
	a.publish("payments", newMessage("bad"), newMessage("good"))
	if got := runs.Load(); got != 4 {
		t.Fatalf("the handler ran %d times, want 1 and 3 retries", got)
	}
	a.wantPoisoned("bad")
	a.wantEffects("good")
	a.wantClaims(1)
}

func TestTooLongIDIsPoisonedOnce(t *testing.T) {
	t.Parallel()
	a := newPostgreSQLApp(t)
	a.router.AddMiddleware(a.order()...)
	a.handle("book", "payments", func(msg *message.Message) error { return a.db.Write(msg.Context(), msg.UUID) })
	a.run()
	long := []string{strings.Repeat("ab", 150), strings.Repeat("xyz", 1000), strings.Repeat("q", 54_000)}
	for _, id := range long {
		a.publish("payments", newMessage(id))
	}
	a.publish("payments", newMessage("good"))
	for _, msg := range a.wantPoisoned(long...) {
		if reason := msg.Metadata.Get(middleware.ReasonForPoisonedKey); !strings.Contains(reason, "message id has") {
			t.Errorf("the reason is %.200q", reason)
		}
	}
	a.wantEffects("good")
}

func TestLosingClaimIsRetriedNotPoisoned(t *testing.T) {
	t.Parallel()
	for name, isolation := range map[string]string{"REPEATABLE READ": "repeatable read", "SERIALIZABLE": "serializable"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			// As a default of the role or the database: nothing in the program says so.
			db.URL += "&default_transaction_isolation=" + strings.ReplaceAll(isolation, " ", "%20")
			db.DB = db.Open(t)
			repository := db.Repository(t, inboxsql.Options{})
			var runs, waiting atomic.Int32
			entered, leave := make(chan struct{}), make(chan struct{})
			apps := []*app{newApp(t, db, repository, inbox.Options{}), newApp(t, db, repository, inbox.Options{})}
			for _, a := range apps {
				a.router.AddMiddleware(a.poisonQueue(), a.retry(50), middleware.Recoverer, func(h message.HandlerFunc) message.HandlerFunc {
					return func(msg *message.Message) ([]*message.Message, error) {
						waiting.Add(1)
						return h(msg)
					}
				}, a.inbox.Middleware)
				a.handle("book", "payments", func(msg *message.Message) error {
					if runs.Add(1) == 1 {
						close(entered)
						<-leave
					}
					return db.Write(msg.Context(), msg.UUID)
				})
				a.run()
			}
			var group sync.WaitGroup
			group.Add(1)
			go func() {
				defer group.Done()
				apps[0].publish("payments", newMessage("1"))
			}()
			<-entered
			group.Add(1)
			go func() {
				defer group.Done()
				apps[1].publish("payments", newMessage("1"))
			}()
			eventually(t, "the copy waits for the first", func() bool {
				return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO %' || current_schema() || '%'`) > 0
			})
			close(leave)
			group.Wait()
			if got := waiting.Load(); got < 3 {
				t.Errorf("%d attempts, want at least 3: the losing claim should have failed once", got)
			}
			for _, a := range apps {
				a.wantPoisoned()
			}
			apps[0].wantEffects("1")
		})
	}
}

func TestDeadlockVictimIsRetriedAsAWhole(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.MustExec(t, `CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)`)
	db.MustExec(t, `INSERT INTO accounts VALUES (1, 0), (2, 0)`)
	repository := db.Repository(t, inboxsql.Options{})
	var failures []error
	var mutex sync.Mutex
	var both sync.WaitGroup // holds the first attempts until each has one row
	both.Add(2)
	var attempts atomic.Int32
	a := newApp(t, db, repository, inbox.Options{})
	a.router.AddMiddleware(a.poisonQueue(), a.retry(3), func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err != nil {
				mutex.Lock()
				defer mutex.Unlock()
				failures = append(failures, err)
			}
			return produced, err
		}
	}, a.inbox.Middleware)
	handler := func(first, second int) message.NoPublishHandlerFunc {
		return func(msg *message.Message) error {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			if _, err := tx.ExecContext(msg.Context(), `UPDATE accounts SET balance = balance + 1 WHERE id = $1`, first); err != nil {
				return err
			}
			if attempts.Add(1) <= 2 {
				both.Done()
				both.Wait()
			}
			_, err := tx.ExecContext(msg.Context(), `UPDATE accounts SET balance = balance + 1 WHERE id = $1`, second)
			return err
		}
	}
	a.handle("up", "up", handler(1, 2))
	a.handle("down", "down", handler(2, 1))
	a.run()
	var group sync.WaitGroup
	for _, topic := range []string{"up", "down"} {
		group.Add(1)
		go func() {
			defer group.Done()
			a.publish(topic, newMessage("1"))
		}()
	}
	group.Wait()
	if len(failures) == 0 {
		t.Fatal("there was no deadlock")
	}
	for _, failure := range failures {
		var driverErr *pq.Error
		if !errors.As(failure, &driverErr) || driverErr.Code != "40P01" {
			t.Fatalf("failure %v, want a deadlock, found by errors.As", failure)
		}
		if inbox.ShouldPoison(failure) {
			t.Fatal("a deadlock victim would be poisoned")
		}
	}
	a.wantPoisoned()
	a.wantClaims(2)
	if got := db.Count(t, `SELECT sum(balance) FROM accounts`); got != 4 {
		t.Fatalf("balances sum to %d, want 4", got)
	}
}

func TestSwallowedUniqueViolation(t *testing.T) {
	t.Parallel()
	a := newPostgreSQLApp(t)
	a.db.MustExec(t, `CREATE UNIQUE INDEX ON effects (effect)`)
	a.db.MustExec(t, `INSERT INTO effects VALUES ('1'), ('2')`)
	a.router.AddMiddleware(a.order()...)
	a.handle("book", "payments", func(msg *message.Message) error {
		_ = a.db.Write(msg.Context(), msg.UUID) // "somebody has done it already"
		return nil
	})
	a.handle("book with a savepoint", "payments with a savepoint", func(msg *message.Message) error {
		tx, _ := inboxsql.TxFromContext(msg.Context())
		if _, err := tx.ExecContext(msg.Context(), `SAVEPOINT s`); err != nil {
			return err
		}
		if a.db.Write(msg.Context(), msg.UUID) != nil {
			_, err := tx.ExecContext(msg.Context(), `ROLLBACK TO SAVEPOINT s`)
			return err
		}
		return nil
	})
	a.run()
	a.publish("payments", newMessage("1"), newMessage("3"))
	poisoned := a.wantPoisoned("1")
	if reason := poisoned[0].Metadata.Get(middleware.ReasonForPoisonedKey); !strings.Contains(reason, "the handler broke its transaction") {
		t.Errorf("the reason is %q", reason)
	}
	a.wantClaims(1)
	a.publish("payments with a savepoint", newMessage("2"))
	a.wantPoisoned("1")
	a.wantClaims(2)
	a.wantEffects("1", "2", "3")
}

func TestTimeoutLeavesADeadContext(t *testing.T) {
	t.Parallel()
	for name, reset := range map[string]bool{"with reset": true, "without reset": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgreSQLApp(t)
			var attempts []error
			a.router.AddMiddleware(
				a.poisonQueue(),
				middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, Multiplier: 1, ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: reset}.Middleware,
				func(h message.HandlerFunc) message.HandlerFunc {
					return func(msg *message.Message) ([]*message.Message, error) {
						produced, err := h(msg)
						attempts = append(attempts, err)
						return produced, err
					}
				},
				middleware.Timeout(2*time.Second),
				a.inbox.Middleware,
			)
			var runs int
			a.handle("book", "payments", func(msg *message.Message) error {
				runs++
				if runs == 1 {
					<-msg.Context().Done()
				}
				return a.db.Write(context.WithoutCancel(msg.Context()), msg.UUID)
			})
			a.run()
			a.publish("payments", newMessage("1"))
			if !errors.Is(attempts[0], context.DeadlineExceeded) {
				t.Errorf("the first attempt ended with %v, want it to match context.DeadlineExceeded", attempts[0])
			}
			// Without the reset every further attempt of that delivery fails at once, and only the
			// redelivery succeeds. Nothing is poisoned in either case.
			if want := map[bool]int{true: 2, false: 4}[reset]; len(attempts) != want {
				t.Errorf("%d attempts, want %d: %v", len(attempts), want, attempts)
			}
			a.wantPoisoned()
			a.wantEffects("1")
		})
	}
}

func TestPoisonQueueAndInbox(t *testing.T) {
	t.Parallel()
	failing := func(a *app, fixed *atomic.Bool) message.NoPublishHandlerFunc {
		return func(msg *message.Message) error {
			if err := a.db.Write(msg.Context(), msg.UUID); err != nil {
				return err
			}
			if fixed.Load() {
				return nil
			}
			return errors.New("bug in the handler")
		}
	}
	t.Run("outside, as documented", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		var fixed atomic.Bool
		a.handle("book", "payments", failing(a, &fixed))
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantEffects()
		a.wantClaims(0)
		poisoned := a.wantPoisoned("1")
		fixed.Store(true)
		a.publish("payments", poisoned[0])
		a.wantEffects("1")
	})
	t.Run("outside, and the poison queue refuses", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		a.poison.fails = 2
		var fixed atomic.Bool
		a.handle("book", "payments", failing(a, &fixed))
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantPoisoned("1")
		a.wantEffects()
		a.wantClaims(0)
	})
	t.Run("inside, which is wrong: half of the work and the claim are committed", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.inbox.Middleware, a.poisonQueue())
		var fixed atomic.Bool
		a.handle("book", "payments", failing(a, &fixed))
		a.run()
		a.publish("payments", newMessage("1"))
		poisoned := a.wantPoisoned("1")
		a.wantEffects("1")
		a.wantClaims(1)
		fixed.Store(true)
		a.publish("payments", poisoned[0]) // skipped as a duplicate
		a.wantEffects("1")
	})
}

func TestRetryAndDuplicator(t *testing.T) {
	t.Parallel()
	firstFails := func(a *app, fail func(context.Context) error) message.NoPublishHandlerFunc {
		runs := 0
		return func(msg *message.Message) error {
			if err := a.db.Write(msg.Context(), msg.UUID); err != nil {
				return err
			}
			if runs++; runs == 1 {
				return fail(msg.Context())
			}
			return nil
		}
	}
	otherError := func(context.Context) error { return errors.New("the mail server is away") }
	t.Run("retry outside, as documented", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		a.handle("book", "payments", firstFails(a, otherError))
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantEffects("1")
	})
	t.Run("retry inside, which is wrong: the failed try's writes are committed too", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.inbox.Middleware, a.retry(2))
		a.handle("book", "payments", firstFails(a, otherError))
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantEffects("1", "1")
	})
	t.Run("retry inside, SQL error: every further try fails, the redelivery succeeds", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.inbox.Middleware, a.retry(2))
		a.handle("book", "payments", firstFails(a, func(ctx context.Context) error {
			tx, _ := inboxsql.TxFromContext(ctx)
			_, err := tx.ExecContext(ctx, `SELECT 1 / 0`)
			return err
		}))
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantEffects("1")
	})
	t.Run("duplicator outside", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(middleware.Duplicator, a.inbox.Middleware)
		a.handle("book", "payments", func(msg *message.Message) error { return a.db.Write(msg.Context(), msg.UUID) })
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantEffects("1")
	})
}

// An outage and a shutdown are never the message's fault.
func TestPoisonQueueStaysEmpty(t *testing.T) {
	t.Parallel()
	t.Run("database down past all retries, and a shutdown during a back-off", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		down, err := sql.Open("postgres", "postgres://postgres@127.0.0.1:1/postgres?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = down.Close() })
		repository, err := inboxsql.NewRepository(down, inboxsql.Options{SchemaAdapter: db.Adapter})
		if err != nil {
			t.Fatal(err)
		}
		a := newApp(t, db, repository, inbox.Options{})
		backingOff := make(chan struct{})
		var once sync.Once
		var deliveries atomic.Int32
		a.router.AddMiddleware(a.poisonQueue(), func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				if deliveries.Add(1) <= 2 {
					return a.retry(3)(h)(msg) // exhausted
				}
				return middleware.Retry{
					MaxRetries: 10, InitialInterval: time.Hour, Multiplier: 1, ShouldRetry: func(params middleware.RetryParams) bool {
						once.Do(func() { close(backingOff) })
						return inbox.ShouldRetry(params)
					}, ResetContextOnRetry: true,
				}.Middleware(h)(msg)
			}
		}, middleware.Recoverer, a.inbox.Middleware)
		a.handle("book", "payments", func(*message.Message) error {
			t.Error("the handler ran without a claim")
			return nil
		})
		a.run()
		go func() { _ = a.broker.Publish("payments", newMessage("1")) }()
		<-backingOff
		a.stop()
		a.wantPoisoned()
	})
	t.Run("the handler's own statement meets a terminated backend", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.poisonQueue(), a.inbox.Middleware) // no retry, so that each error is judged
		admin := a.db.Open(t)
		runs := 0
		a.handle("book", "payments", func(msg *message.Message) error {
			if runs++; runs == 1 {
				terminate(t, admin, backend(t, msg.Context()))
			}
			return a.db.Write(msg.Context(), msg.UUID)
		})
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantPoisoned()
		a.wantEffects("1")
	})
}

// backend returns the process of the handler's session.
func backend(t testing.TB, ctx context.Context) int {
	t.Helper()
	tx, _ := inboxsql.TxFromContext(ctx)
	var pid int
	if err := tx.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		t.Errorf("cannot tell the backend: %v", err)
	}
	return pid
}

// terminate ends a session and waits until it is gone.
func terminate(t testing.TB, admin *sql.DB, pid int) {
	t.Helper()
	if _, err := admin.Exec(`SELECT pg_terminate_backend($1, 30000)`, pid); err != nil {
		t.Errorf("cannot terminate the backend: %v", err)
	}
}

// The documented way to roll back and be acknowledged.
func TestSkippedMessage(t *testing.T) {
	t.Parallel()
	skip := errors.New("nothing to do any more")
	a := newPostgreSQLApp(t)
	a.router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if errors.Is(err, skip) {
				return nil, nil
			}
			return produced, err
		}
	})
	err := a.inbox.AddTo(a.router, inbox.RouterOptions{
		PoisonPublisher: a.poison, PoisonTopic: "poison",
		ShouldPoison: func(err error) bool { return !errors.Is(err, skip) && inbox.ShouldPoison(err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	a.handle("book", "payments", func(msg *message.Message) error {
		err := a.db.Write(msg.Context(), msg.UUID)
		if err == nil && msg.UUID == "late" {
			return inbox.Permanent(skip)
		}
		return err
	})
	a.run()
	a.publish("payments", newMessage("late"), newMessage("good"))
	a.wantPoisoned()
	a.wantEffects("good")
	a.wantClaims(1)
}
