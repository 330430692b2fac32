package sql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/lib/pq"
	"modernc.org/sqlite"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// Whatever the handler runs without a context ends with the transaction's, as with lib/pq itself.
func TestFusedStatementsAreBoundToTheTransaction(t *testing.T) {
	t.Parallel()
	const sleep = `SELECT pg_sleep(20)`
	for name, run := range map[string]func(tx *sql.Tx) error{
		"Exec":  func(tx *sql.Tx) error { _, err := tx.Exec(sleep); return err },
		"Query": func(tx *sql.Tx) error { return tx.QueryRow(sleep).Scan(new(string)) },
		"Exec with arguments": func(tx *sql.Tx) error {
			_, err := tx.Exec(`SELECT pg_sleep($1)`, 20)
			return err
		},
		"Exec with a context of its own": func(tx *sql.Tx) error {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, err := tx.ExecContext(ctx, sleep)
			return err
		},
		"Query with a context of its own": func(tx *sql.Tx) error {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			return tx.QueryRowContext(ctx, sleep).Scan(new(string))
		},
		"prepared": func(tx *sql.Tx) error {
			stmt, err := tx.Prepare(`SELECT pg_sleep($1)`)
			if err != nil {
				return err
			}
			defer stmt.Close()
			_, err = stmt.Exec(20)
			return err
		},
		"prepared query": func(tx *sql.Tx) error {
			stmt, err := tx.Prepare(`SELECT pg_sleep($1)`)
			if err != nil {
				return err
			}
			defer stmt.Close()
			return stmt.QueryRow(20).Scan(new(string))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQLFused(t)
			db.SetMaxOpenConns(1)
			slow := true
			handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
				if !slow {
					return db.Write(msg.Context(), msg.UUID)
				}
				tx, _ := inboxsql.TxFromContext(msg.Context())
				return run(tx)
			})
			started := time.Now()
			if _, err := middleware.Timeout(300 * time.Millisecond)(handler)(newMessage("1")); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the error is %v", err)
			}
			if took := time.Since(started); took > 10*time.Second {
				t.Errorf("it ran for %s under a context of 300 ms", took)
			}
			slow = false
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatal(err)
			}
			wantIdle(t, db)
		})
	}
}

// A long transaction does not keep something of each of its queries.
func TestFusedForgetsQueriesWithTheirRows(t *testing.T) {
	db := testdb.PostgreSQLFused(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	stmt, err := tx.Prepare(`SELECT $1::int`)
	if err != nil {
		t.Fatal(err)
	}
	defer stmt.Close()
	heap := func() int64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before := heap()
	const queries = 5000
	for range queries {
		var one int
		if err := errors.Join(tx.QueryRowContext(ctx, `SELECT 1`).Scan(&one), stmt.QueryRowContext(ctx, 1).Scan(&one)); err != nil {
			t.Fatal(err)
		}
	}
	if kept := (heap() - before) / queries; kept > 100 {
		t.Errorf("%d bytes are kept of each query", kept)
	}
}

// A statement's own context still ends it, and only it.
func TestFusedStatementKeepsItsOwnContext(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		tx, _ := inboxsql.TxFromContext(msg.Context())
		// Rows of a query outlive the call, and other statements' contexts.
		rows, err := tx.QueryContext(msg.Context(), `SELECT generate_series(1, 1000)`)
		if err != nil {
			return err
		}
		count := 0
		for rows.Next() {
			count++
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil || count != 1000 {
			return fmt.Errorf("%d rows: %w", count, err)
		}
		ctx, cancel := context.WithTimeout(msg.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = tx.ExecContext(ctx, `SELECT pg_sleep(20)`)
		return err
	})
	if _, err := handler(newMessage("1")); err == nil {
		t.Fatal("the statement outlived its context")
	}
}

// Somebody has left a transaction open on a pooled connection. A claim must not join it: it would commit
// the stranger's work.
func TestFusedRefusesAStrangersTransaction(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string][]string{
		"open":     {`BEGIN`, `INSERT INTO effects VALUES ('stranger')`},
		"empty":    {`BEGIN`},
		"in error": {`BEGIN`, `SELECT 1 / 0`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQLFused(t)
			db.SetMaxOpenConns(1)
			repository := db.Repository(t, inboxsql.Options{})
			handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
			if _, err := handler(newMessage("warm up")); err != nil {
				t.Fatal(err)
			}
			for _, text := range leave {
				_, _ = db.Exec(text)
			}
			if _, err := handler(newMessage("1")); err == nil {
				t.Fatal("the claim joined the stranger's transaction")
			}
			// The connection is gone with it, and the next one is good.
			if _, err := handler(newMessage("1")); err != nil {
				t.Fatal(err)
			}
			if got := db.Count(t, `SELECT count(*) FROM effects WHERE effect = 'stranger'`); got != 0 {
				t.Fatal("the stranger's work was committed")
			}
			wantIdle(t, db)
		})
	}
}

// The connection is used behind database/sql's back.
func TestFusedRefusesATransactionBegunByTheDriver(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	db.SetMaxOpenConns(1)
	repository := db.Repository(t, inboxsql.Options{})
	ctx := context.Background()
	transaction, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := transaction.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	err = conn.Raw(func(raw any) error {
		//lint:ignore SA1019 it is deprecated, and there
		_, err := raw.(driver.Conn).Begin()
		return err
	})
	if err := errors.Join(err, conn.Close()); err != nil {
		t.Fatal(err)
	}
	transaction, _, err = repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "2"}})
	if err == nil {
		_ = transaction.Rollback()
		t.Error("the claim joined the stranger's transaction")
	}
	if tx, err := db.BeginTx(ctx, &sql.TxOptions{}); err != nil {
		t.Error(err)
	} else {
		_ = tx.Rollback()
	}
}

func TestFusedKeepsTheIsolationLevel(t *testing.T) {
	t.Parallel()
	for level, want := range map[sql.IsolationLevel]string{
		sql.LevelDefault: "read committed", sql.LevelReadCommitted: "read committed",
		sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
	} {
		db := testdb.PostgreSQLFused(t)
		var got string
		handler := wrap(t, db.Repository(t, inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: level}}), inbox.Options{}, func(msg *message.Message) error {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			return tx.QueryRow(`SHOW transaction_isolation`).Scan(&got)
		})
		if _, err := handler(newMessage("1")); err != nil || got != want {
			t.Errorf("%s: %q, %v", level, got, err)
		}
	}
	db := testdb.PostgreSQLFused(t)
	repository := db.Repository(t, inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelLinearizable}})
	if _, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}}); err == nil {
		t.Error("an unsupported level is accepted")
	}
}

// An error of the fused query leaves a good connection in the pool: no new one is opened.
func TestFusedErrorLeavesTheConnectionGood(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	db.SetMaxOpenConns(1)
	repository := db.Repository(t, inboxsql.Options{})
	backendOf := func() int { return db.Count(t, `SELECT pg_backend_pid()`) }
	before := backendOf()
	db.MustExec(t, `ALTER TABLE watermill_inbox ADD COLUMN required text NOT NULL`)
	for range 3 {
		if _, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}}); err == nil {
			t.Fatal("no error")
		}
	}
	db.MustExec(t, `ALTER TABLE watermill_inbox DROP COLUMN required`)
	transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := transaction.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
	if after := backendOf(); after != before {
		t.Error("the connection was thrown away")
	}
}

// Other users of the pool are untouched, and nothing is different for them.
func TestFusedPoolForOthers(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	db.SetMaxOpenConns(1)
	repository := db.Repository(t, inboxsql.Options{})
	ctx := context.Background()
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	var isolation, readOnly string
	if err := tx.QueryRow(`SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only')`).Scan(&isolation, &readOnly); err != nil || isolation != "serializable" || readOnly != "on" {
		t.Errorf("%s, %s, %v", isolation, readOnly, err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	// COPY, in a transaction of one's own and in the handler's.
	copyIn := func(tx *sql.Tx, effect string) error {
		stmt, err := tx.Prepare(`COPY effects (effect) FROM STDIN`)
		if err != nil {
			return err
		}
		if _, err := stmt.Exec(effect); err != nil {
			return err
		}
		if _, err := stmt.Exec(); err != nil {
			return err
		}
		return stmt.Close()
	}
	tx, err = db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(copyIn(tx, "own"), tx.Commit()); err != nil {
		t.Error(err)
	}
	handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		tx, _ := inboxsql.TxFromContext(msg.Context())
		return copyIn(tx, "handler's")
	})
	if _, err := handler(newMessage("1")); err != nil {
		t.Error(err)
	}
	// A statement prepared on the pool, used in the handler's transaction, with a slice and a NULL.
	stmt, err := db.Prepare(`INSERT INTO effects SELECT unnest($1::text[])`)
	if err != nil {
		t.Fatal(err)
	}
	defer stmt.Close()
	handler = wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		tx, _ := inboxsql.TxFromContext(msg.Context())
		_, err := tx.Stmt(stmt).Exec(pq.Array([]string{"a", "b"}))
		return err
	})
	if _, err := handler(newMessage("2")); err != nil {
		t.Error(err)
	}
	(&app{t: t, db: db}).wantEffects("a", "b", "handler's", "own")
	if err := db.PingContext(ctx); err != nil {
		t.Error(err)
	}
}

// No ability that lib/pq's connections show to database/sql is hidden.
func TestFusedShowsLibPQsInterfaces(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	plain, err := pq.NewConnector(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	fused, err := inboxpq.NewConnector(plain)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]driver.Conn, 2)
	for i, connector := range []driver.Connector{plain, fused} {
		if conns[i], err = connector.Connect(context.Background()); err != nil {
			t.Fatal(err)
		}
		defer conns[i].Close()
	}
	for _, ability := range []reflect.Type{
		reflect.TypeFor[driver.ConnBeginTx](), reflect.TypeFor[driver.ConnPrepareContext](), reflect.TypeFor[driver.ExecerContext](),
		reflect.TypeFor[driver.QueryerContext](), reflect.TypeFor[driver.NamedValueChecker](), reflect.TypeFor[driver.Pinger](),
		reflect.TypeFor[driver.SessionResetter](), reflect.TypeFor[driver.Validator](), reflect.TypeFor[driver.Tx](),
		reflect.TypeFor[interface {
			CheckNamedValue(*driver.NamedValue) error
		}](),
	} {
		if reflect.TypeOf(conns[0]).Implements(ability) && !reflect.TypeOf(conns[1]).Implements(ability) {
			t.Errorf("%s is hidden", ability)
		}
	}
}

type otherConnector struct{ driver.Connector }

func (otherConnector) Driver() driver.Driver { return &sqlite.Driver{} }

func TestFusedRefusesOtherDrivers(t *testing.T) {
	t.Parallel()
	if _, err := inboxpq.NewConnector(otherConnector{}); err == nil || !strings.Contains(err.Error(), "sqlite.Driver") {
		t.Errorf("another driver: %v", err)
	}
	if _, err := inboxpq.NewConnector(nil); err == nil {
		t.Error("nil: no error")
	}
}

// After a restart of the server the pool's connections are stale; database/sql begins again on a new one,
// and the claim's state is that of the last try.
func TestFusedBeginsAgainOnAStaleConnection(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	admin := db.Open(t)
	db.SetMaxOpenConns(1)
	runs := 0
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		runs++
		return db.Write(msg.Context(), msg.UUID)
	})
	for i, id := range []string{"1", "2", "1", "2"} {
		terminate(t, admin, db.Count(t, `SELECT pg_backend_pid()`))
		if _, err := handler(newMessage(id)); err != nil {
			// lib/pq may learn of the end only from the answer to the claim. Nothing has happened then.
			if _, err := handler(newMessage(id)); err != nil {
				t.Fatalf("message %d: %v", i, err)
			}
		}
	}
	if runs != 2 {
		t.Errorf("the handler ran %d times, want 2", runs)
	}
	(&app{t: t, db: db}).wantEffects("1", "2")
}

// Claims on a connection that has had somebody else's transaction, whose context is long over or not.
func TestFusedAfterATransactionOfSomebodyElse(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*sql.Tx) error{"Commit": (*sql.Tx).Commit, "Rollback": (*sql.Tx).Rollback} {
		for _, cancelled := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, cancelled %v", name, cancelled), func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQLFused(t)
				db.SetMaxOpenConns(1)
				repository := db.Repository(t, inboxsql.Options{})
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(`SELECT 1`); err != nil {
					t.Fatal(err)
				}
				pid := sessionOf(t, tx)
				if err := end(tx); err != nil {
					t.Fatal(err)
				}
				if cancelled {
					cancel()
				}
				for i := range 4 {
					key := inbox.Key{Consumer: "c", MessageID: fmt.Sprint(i / 2)}
					transaction, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key})
					if err != nil {
						t.Fatal(err)
					}
					if i%2 == 0 {
						if err := transaction.Commit(context.Background()); err != nil {
							t.Fatal(err)
						}
					} else if transaction != nil || record == nil {
						t.Fatal("the copy is no duplicate")
					}
				}
				tx, err = db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				if got := sessionOf(t, tx); got != pid {
					t.Error("the connection was given up")
				}
			})
		}
	}
}

// What somebody else runs in a transaction of his own ends with its context, as with lib/pq.
func TestFusedTransactionsOfOthersEndWithTheirContext(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	pid := sessionOf(t, tx)
	failed := make(chan error, 1)
	go func() {
		_, err := tx.Exec(`SELECT pg_sleep(600)`)
		failed <- err
	}()
	running := `SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND state = 'active' AND query = 'SELECT pg_sleep(600)'`
	eventually(t, "the statement runs", func() bool { return db.Count(t, running, pid) == 1 })
	cancel()
	if err := <-failed; err == nil {
		t.Error("no error")
	}
	eventually(t, "the statement ends", func() bool { return db.Count(t, running, pid) == 0 })
	wantIdle(t, db)
}

func sessionOf(t testing.TB, tx *sql.Tx) (pid int) {
	t.Helper()
	if err := tx.QueryRow(`SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

// A COPY that is left open costs its message, not the connection.
func TestFusedOpenCopyKeepsTheConnection(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQLFused(t)
	db.SetMaxOpenConns(1)
	repository := db.Repository(t, inboxsql.Options{})
	before := db.Count(t, `SELECT pg_backend_pid()`)
	for _, failure := range []error{nil, errors.New("no funds")} {
		handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			statement, err := tx.Prepare(`COPY effects (effect) FROM STDIN`)
			if err != nil {
				t.Error(err)
				return err
			}
			_, err = statement.Exec("copied")
			return errors.Join(err, failure)
		})
		_, err := handler(newMessage("1"))
		if failure != nil && !errors.Is(err, failure) || failure == nil && !errors.Is(err, inbox.ErrTransactionBroken) {
			t.Fatalf("the handler's error is %v, and the message's %v", failure, err)
		}
	}
	if after := db.Count(t, `SELECT pg_backend_pid()`); after != before {
		t.Fatal("the connection is another one")
	}
}
