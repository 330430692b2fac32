package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
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
	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// drivers runs a test on lib/pq, on lib/pq behind the fused connector, and on pgx.
func drivers(t *testing.T, test func(t *testing.T, driver string)) {
	t.Helper()
	for _, driver := range []string{"postgres", "fused", "pgx"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			test(t, driver)
		})
	}
}

// wrap returns the handler behind the inbox, under consumer "c", without a router.
func wrap(t testing.TB, repository inbox.Repository, options inbox.Options, handler message.NoPublishHandlerFunc) message.HandlerFunc {
	t.Helper()
	options.Consumer = func(string) string { return "c" }
	m, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		t.Fatal(err)
	}
	return m.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, handler(msg) })
}

func wantIdle(t testing.TB, db *testdb.Database) {
	t.Helper()
	// database/sql rolls back in a goroutine of its own when a context ends.
	eventually(t, "no connection is in use", func() bool { return db.Stats().InUse == 0 })
	eventually(t, "no session is idle in transaction", func() bool {
		return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND query LIKE '%' || current_schema() || '%'`) == 0
	})
}

func TestPoolExhaustionIsBounded(t *testing.T) {
	t.Parallel()
	t.Run("the handler uses the pool, which has one connection", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		db.SetMaxOpenConns(1)
		leaky := true
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			if leaky {
				_, err := db.ExecContext(msg.Context(), `SELECT 1`)
				return err
			}
			return db.Write(msg.Context(), msg.UUID)
		})
		_, err := middleware.Timeout(300 * time.Millisecond)(handler)(newMessage("1"))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("the error is %v", err)
		}
		wantIdle(t, db)
		leaky = false
		if _, err := handler(newMessage("2")); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("waiting copies hold the connections", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		db.SetMaxOpenConns(2)
		entered, leave := make(chan struct{}), make(chan struct{})
		var runs atomic.Int32
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{ClaimTimeout: 2 * time.Second}, func(msg *message.Message) error {
			if msg.UUID == "slow" && runs.Add(1) == 1 {
				close(entered)
				<-leave
			}
			return db.Write(msg.Context(), msg.UUID)
		})
		var group sync.WaitGroup
		run := func(id string, check func(error)) {
			group.Add(1)
			go func() {
				defer group.Done()
				_, err := handler(newMessage(id))
				check(err)
			}()
		}
		run("slow", func(err error) {
			if err != nil {
				t.Error(err)
			}
		})
		<-entered
		var copies sync.WaitGroup
		for range 3 {
			copies.Add(1)
			run("slow", func(err error) {
				defer copies.Done()
				if !errors.Is(err, inbox.ErrInFlight) {
					t.Errorf("a copy's error is %v, want ErrInFlight", err)
				}
			})
		}
		copies.Wait()
		if _, err := handler(newMessage("unrelated")); err != nil {
			t.Errorf("the unrelated message: %v", err)
		}
		close(leave)
		group.Wait()
		wantIdle(t, db)
	})
}

func TestSwallowedErrorIsNeverAcked(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			if err := db.Write(msg.Context(), msg.UUID); err != nil {
				return err
			}
			tx, _ := inboxsql.TxFromContext(msg.Context())
			_, _ = tx.ExecContext(msg.Context(), `SELECT 1 / 0`)
			return nil
		})
		_, err := handler(newMessage("1"))
		if !errors.Is(err, inbox.ErrTransactionBroken) {
			t.Fatalf("the error is %v", err)
		}
		// Lib/pq itself refuses to commit; on the other drivers the server refuses the proof.
		var stateErr interface{ SQLState() string }
		if driver == "postgres" && !errors.Is(err, pq.ErrInFailedTransaction) ||
			driver != "postgres" && (!errors.As(err, &stateErr) || stateErr.SQLState() != "25P02") {
			t.Fatalf("the driver's error is hidden: %v", err)
		}
		if inbox.ShouldRetry(middleware.RetryParams{Err: err}) == false {
			t.Fatalf("a failed statement is not tried again: %v", err)
		}
		if got := db.Count(t, `SELECT (SELECT count(*) FROM effects) + (SELECT count(*) FROM watermill_inbox)`); got != 0 {
			t.Fatalf("%d rows were committed", got)
		}
	})
}

// A handler that ends the transaction by SQL text is not noticed by database/sql.
func TestHandlerEndsTheTransactionByText(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(testing.TB) *testdb.Database{
		"lib-pq":        func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
		"lib-pq, fused": testdb.PostgreSQLFused,
		"pgx":           func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") },
		"SQLite":        testdb.SQLite,
	} {
		for text, effects := range map[string]int{"ROLLBACK": 0, "COMMIT": 1, "ROLLBACK AND CHAIN": 0} {
			if text == "ROLLBACK AND CHAIN" && (name == "lib-pq" || name == "SQLite") {
				// SQLite has no such thing. On lib/pq it is the documented exception: who replaces the
				// transaction by another one, by SQL text, is not noticed without a round trip more.
				continue
			}
			t.Run(name+" "+text, func(t *testing.T) {
				t.Parallel()
				db := open(t)
				db.SetMaxOpenConns(1)
				ends := true
				handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
					if err := db.Write(msg.Context(), msg.UUID); err != nil || !ends {
						return err
					}
					tx, _ := inboxsql.TxFromContext(msg.Context())
					_, err := tx.ExecContext(msg.Context(), text)
					return err
				})
				if _, err := handler(newMessage("1")); err == nil {
					t.Fatal("the message was acknowledged")
				} else if !errors.Is(err, inbox.ErrTransactionBroken) {
					t.Fatalf("the error is %v, want ErrTransactionBroken", err)
				}
				if got := db.Count(t, `SELECT count(*) FROM effects`); got != effects {
					t.Fatalf("%d effects, want %d", got, effects)
				}
				ends = false
				if _, err := handler(newMessage("1")); err != nil {
					t.Fatal(err)
				}
				if got := db.Count(t, `SELECT count(*) FROM effects`); got != 1 {
					t.Fatalf("%d effects after the redelivery, want 1", got)
				}
			})
		}
	}
}

// Savepoints that the handler leaves open, as gorm's nested transactions do, are nothing to complain about.
func TestOpenSavepoints(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
		a.router.AddMiddleware(a.poisonQueue(), a.inbox.Middleware)
		events := &recorder{}
		a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			if _, err := tx.ExecContext(msg.Context(), `SAVEPOINT one; SAVEPOINT two`); err != nil {
				return nil, err
			}
			return []*message.Message{newMessage("event")}, db.Write(msg.Context(), msg.UUID)
		})
		a.run()
		a.publish("payments", newMessage("1"))
		a.wantPoisoned()
		a.wantEffects("1")
		if len(events.all()) != 1 {
			t.Error("the event was not published")
		}
	})
}

func TestUnfinishedResultSet(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		for variant, wantErr := range map[string]bool{"returns the insert's error": true, "ignores it": false, "only leaks the rows": false} {
			t.Run(variant, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, driver)
				db.SetMaxOpenConns(1)
				var insertFailed bool
				handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
					if msg.UUID == "next" {
						return db.Write(msg.Context(), msg.UUID)
					}
					tx, _ := inboxsql.TxFromContext(msg.Context())
					rows, err := tx.QueryContext(msg.Context(), `SELECT generate_series(1, 100000)`)
					if err != nil {
						return err
					}
					rows.Next()
					if variant == "only leaks the rows" {
						return nil
					}
					err = db.Write(msg.Context(), msg.UUID)
					insertFailed = err != nil
					if wantErr {
						return err
					}
					return nil
				})
				_, err := handler(newMessage("1"))
				effects := db.Count(t, `SELECT count(*) FROM effects`)
				claims := db.Count(t, `SELECT count(*) FROM watermill_inbox`)
				t.Logf("insert failed: %v, error: %v, effects %d, claims %d", insertFailed, err, effects, claims)
				if wantErr && insertFailed && (err == nil || claims != 0) {
					t.Fatalf("the handler's error was lost: %v, %d claims", err, claims)
				}
				if (err == nil) != (claims == 1) {
					t.Fatalf("error %v and %d claims", err, claims)
				}
				if _, err := handler(newMessage("next")); err != nil {
					t.Fatalf("the next message: %v", err)
				}
				wantIdle(t, db)
			})
		}
	})
}

func TestDeferredConstraintFailsAtCommit(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		db.MustExec(t, `CREATE TABLE parents (id int PRIMARY KEY)`)
		db.MustExec(t, `CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`)
		events := &recorder{}
		a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
		a.router.AddMiddleware(a.poisonQueue(), a.inbox.Middleware)
		a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			_, err := tx.ExecContext(msg.Context(), `INSERT INTO children VALUES (1)`)
			return []*message.Message{newMessage("event")}, err
		})
		a.run()
		a.publish("payments", newMessage("1"))
		reason := a.wantPoisoned("1")[0].Metadata.Get(middleware.ReasonForPoisonedKey)
		if !strings.Contains(reason, "23503") {
			t.Errorf("the reason does not tell the driver's error: %q", reason)
		}
		a.wantClaims(0)
		if got := len(events.all()); got != 0 {
			t.Fatalf("%d events of a failed commit were published", got)
		}
	})
}

func TestCancellationAroundCommit(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		var cancel context.CancelFunc
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			err := db.Write(context.WithoutCancel(msg.Context()), msg.UUID)
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
		t.Logf("%d of 500 acknowledged, %d effects, %d claims", acked, effects, claims)
		if effects != claims || acked != effects {
			t.Fatalf("%d acknowledged, %d effects, %d claims", acked, effects, claims)
		}
		if got := db.Count(t, `SELECT count(DISTINCT effect) FROM effects`); got != effects+500 {
			t.Fatalf("%d effects are distinct", got)
		}
		wantIdle(t, db)
	})
}

func TestPanicsAndGoexitLeakNothing(t *testing.T) {
	t.Parallel()
	for _, recoverer := range []string{"outside", "inside"} {
		t.Run("Recoverer "+recoverer, func(t *testing.T) {
			t.Parallel()
			a := newPostgreSQLApp(t)
			chain := []message.HandlerMiddleware{middleware.Recoverer, a.inbox.Middleware}
			if recoverer == "inside" {
				chain = []message.HandlerMiddleware{a.inbox.Middleware, middleware.Recoverer}
			}
			a.router.AddMiddleware(chain...)
			failed := map[string]bool{}
			var mutex sync.Mutex
			a.handle("book", "payments", func(msg *message.Message) error {
				if err := a.db.Write(msg.Context(), msg.UUID); err != nil {
					return err
				}
				mutex.Lock()
				first := !failed[msg.UUID]
				failed[msg.UUID] = true
				mutex.Unlock()
				if first {
					switch msg.UUID {
					case "value":
						panic("boom")
					case "error":
						panic(errors.New("boom"))
					case "nil":
						panic(nil)
					}
				}
				return nil
			})
			a.run()
			a.publish("payments", newMessage("value"), newMessage("error"), newMessage("nil"), newMessage("normal"))
			a.wantEffects("error", "nil", "normal", "value")
			wantIdle(t, a.db)
		})
	}
}

func TestSessionKilledUnderTheHandler(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		for _, variant := range []string{"idle, then returns", "idle, then swallows a statement's error", "terminated"} {
			t.Run(variant, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, driver)
				admin := db.Open(t)
				db.URL += "&idle_in_transaction_session_timeout=200"
				db.DB = db.Open(t)
				db.SetMaxOpenConns(1)
				first := true
				handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
					if !first {
						return db.Write(msg.Context(), msg.UUID)
					}
					first = false
					pid := backend(t, msg.Context())
					if variant == "terminated" {
						terminate(t, admin, pid)
					} else {
						eventually(t, "the server ends the idle session", func() bool {
							var count int
							err := admin.QueryRow(`SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&count)
							return err == nil && count == 0
						})
					}
					if variant != "idle, then returns" {
						_ = db.Write(msg.Context(), "outside the transaction")
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
				if got, _ := db.Effects(context.Background()); len(got) != 1 || got[0] != "1" {
					t.Fatalf("effects %q", got)
				}
				wantIdle(t, db)
			})
		}
	})
}

func TestCutInTheMiddleOfAnAnswer(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		for name, request := range map[string]string{
			"begin":             "begin",
			"the claim":         `"watermill_inbox" ("consumer", "message_id")`,
			"the handler's row": "SELECT repeat",
			"the commit":        "commit",
		} {
			for _, after := range []int{0, 3} {
				t.Run(fmt.Sprintf("%s after %d bytes", name, after), func(t *testing.T) {
					t.Parallel()
					direct := testdb.PostgreSQL(t, driver)
					proxy := testproxy.New(t, direct.Address(t))
					db := direct.Through(t, proxy.Address())
					db.SetMaxOpenConns(1)
					handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
						tx, _ := inboxsql.TxFromContext(msg.Context())
						var text string
						// The comment makes pgx send the text each time, instead of a prepared statement's name.
						if err := tx.QueryRowContext(msg.Context(), `SELECT repeat('x', 100) -- `+msg.UUID).Scan(&text); err != nil {
							return err
						}
						return db.Write(msg.Context(), msg.UUID)
					})
					if _, err := handler(newMessage("warm up")); err != nil {
						t.Fatal(err)
					}
					if driver != "pgx" {
						request = strings.ToUpper(request[:1]) + request[1:] // it spells BEGIN and COMMIT
						if name == "begin" || name == "the commit" {
							request = strings.ToUpper(request)
						}
					}
					cut := proxy.CutAnswer(request, after)
					_, err := handler(newMessage("cut"))
					select {
					case <-cut:
					default:
						t.Fatalf("nothing was cut; the error is %v", err)
					}
					// database/sql may have begun again on a new connection, when only BEGIN was lost, and
					// the claim with it when they are fused.
					if err == nil && name != "begin" && (name != "the claim" || driver != "fused") {
						t.Fatal("the cut message was acknowledged")
					}
					if err != nil && inbox.ShouldPoison(err) {
						t.Fatalf("it would be poisoned: %v", err)
					}
					for i := range 10 {
						if _, err := handler(newMessage(fmt.Sprint("next-", i))); err != nil {
							t.Fatalf("message %d after the cut: %v", i, err)
						}
					}
					if _, err := handler(newMessage("cut")); err != nil {
						t.Fatalf("the redelivery: %v", err)
					}
					if got := direct.Count(t, `SELECT count(*) FROM effects WHERE effect = 'cut'`); got != 1 {
						t.Fatalf("%d effects of the cut message", got)
					}
				})
			}
		}
	})
}

// The database goes away and comes back. Nothing is acked or skipped in between, and each message is applied once.
func TestDatabaseIsAwayForAWhile(t *testing.T) {
	t.Parallel()
	server := ownServer(t)
	db := testdb.PostgreSQLAt(t, "postgres", server.URL())
	a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
	var attempts atomic.Int32
	failedOnce := make(chan struct{})
	var once sync.Once
	a.router.AddMiddleware(
		a.poisonQueue(),
		middleware.Retry{MaxRetries: 1000, InitialInterval: 100 * time.Millisecond, Multiplier: 1, ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true}.Middleware,
		func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				attempts.Add(1)
				produced, err := h(msg)
				if err != nil {
					once.Do(func() { close(failedOnce) })
				}
				return produced, err
			}
		},
		a.inbox.Middleware,
	)
	a.handle("book", "payments", func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
	a.run()
	a.publish("payments", newMessage("before"))
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	var group sync.WaitGroup
	for _, id := range []string{"1", "2", "3"} {
		group.Add(1)
		go func() {
			defer group.Done()
			a.publish("payments", newMessage(id), newMessage(id))
		}()
	}
	<-failedOnce
	if err := server.Restart(context.Background()); err != nil {
		t.Fatal(err)
	}
	group.Wait()
	a.wantEffects("1", "2", "3", "before")
	a.wantPoisoned()
	// The back-off bounds the attempts: three deliveries at a time, ten a second each.
	if got, limit := int(attempts.Load()), 20+int(time.Since(started)/(100*time.Millisecond))*4; got > limit {
		t.Errorf("%d attempts in %s", got, time.Since(started))
	}
}

// ownServer starts a PostgreSQL server for the test. Call it first, so that it stops last.
func ownServer(t testing.TB) *servers.PostgreSQL {
	t.Helper()
	server, err := servers.StartPostgreSQL(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

func TestClaimAndWorkAreOneTransaction(t *testing.T) {
	t.Parallel()
	t.Run("b: the claim's connection drops", func(t *testing.T) {
		t.Parallel()
		direct := testdb.PostgreSQL(t, "postgres")
		proxy := testproxy.New(t, direct.Address(t))
		db := direct.Through(t, proxy.Address())
		runs := 0
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			runs++
			return db.Write(msg.Context(), msg.UUID)
		})
		proxy.Down()
		if _, err := handler(newMessage("1")); err == nil {
			t.Fatal("acknowledged without a database")
		}
		proxy.Up()
		for range 2 {
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatal(err)
			}
		}
		if runs != 1 {
			t.Fatalf("the handler ran %d times", runs)
		}
	})
	t.Run("d: a transaction of the handler's own is outside of the guarantee", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			if _, err := db.ExecContext(msg.Context(), `INSERT INTO effects VALUES ('around')`); err != nil {
				return err
			}
			return errors.New("fails after it")
		})
		for range 2 {
			if _, err := handler(newMessage("1")); err == nil {
				t.Fatal("no error")
			}
		}
		if got := db.Count(t, `SELECT count(*) FROM effects`); got != 2 {
			t.Fatalf("%d effects; documented: what goes around the transaction repeats", got)
		}
	})
}

// The context given to a handler's goroutine keeps no transaction.
func TestLeakedGoroutineCannotReachTheTransaction(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	var kept context.Context
	var tx *sql.Tx
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		kept = msg.Context()
		tx, _ = inboxsql.TxFromContext(kept)
		return nil
	})
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	if _, ok := inboxsql.TxFromContext(kept); ok {
		t.Fatal("the transaction is found after its end")
	}
	if _, err := tx.Exec(`INSERT INTO effects VALUES ('late')`); !errors.Is(err, sql.ErrTxDone) {
		t.Fatalf("a kept transaction answered %v", err)
	}
}
