package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func TestTwoRoutersOnOneSQLiteFile(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.Repository(t, inboxsql.Options{})
	want := []string(nil)
	var group sync.WaitGroup
	for i := range 2 {
		own := *db
		own.DB = db.Open(t)
		a := newApp(t, &own, own.RepositoryWithoutSchema(t, inboxsql.Options{}), inbox.Options{})
		a.router.AddMiddleware(a.order()...)
		a.handle("book", "payments", func(msg *message.Message) error {
			// A read on the pool before the write must not turn into a lock upgrade of the transaction.
			var count int
			if err := own.QueryRowContext(msg.Context(), `SELECT count(*) FROM effects`).Scan(&count); err != nil {
				return err
			}
			return own.Write(msg.Context(), msg.UUID)
		})
		a.run()
		group.Add(1)
		go func() {
			defer group.Done()
			for j := range 100 {
				a.publish("payments", newMessage(fmt.Sprint(j))) // the other router's, half of the time first
			}
			a.wantPoisoned()
		}()
		if i == 0 {
			for j := range 100 {
				want = append(want, fmt.Sprint(j))
			}
		}
	}
	group.Wait()
	a := &app{t: t, db: db}
	a.wantEffects(want...)
}

// Without a busy timeout a claim does not wait. It fails as transient; it is never taken for a duplicate.
func TestSQLiteBusyIsTransient(t *testing.T) {
	t.Parallel()
	db := testdb.SQLiteWith(t, "_pragma=journal_mode(WAL)&_pragma=busy_timeout(0)")
	repository := db.Repository(t, inboxsql.Options{})
	first, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
	if err != nil {
		t.Fatal(err)
	}
	handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
	if _, err := handler(newMessage("2")); err == nil || inbox.ShouldPoison(err) {
		t.Fatalf("the error is %v, want a transient one", err)
	}
	if err := first.Rollback(); err != nil {
		t.Fatal(err)
	}
	if _, err := handler(newMessage("2")); err != nil {
		t.Fatal(err)
	}
}

func TestSQLiteHandlerWritesAroundTheTransaction(t *testing.T) {
	t.Parallel()
	db := testdb.SQLiteWith(t, "_pragma=journal_mode(WAL)&_pragma=busy_timeout(30000)")
	around := true
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		if around {
			_, err := db.ExecContext(msg.Context(), `INSERT INTO effects VALUES ('around')`)
			return err
		}
		return db.Write(msg.Context(), msg.UUID)
	})
	started := time.Now()
	if _, err := middleware.Timeout(300 * time.Millisecond)(handler)(newMessage("1")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the error is %v", err)
	}
	if took := time.Since(started); took > 10*time.Second {
		t.Fatalf("it hung for %s", took)
	}
	around = false
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	// What went around the transaction may have got the lock when the deadline ended that.
	if got := db.Count(t, `SELECT count(*) FROM effects WHERE effect = '1'`); got != 1 {
		t.Fatalf("%d effects", got)
	}
}

func TestFailedCommitLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	db := testdb.SQLiteWith(t, "_pragma=journal_mode(DELETE)&_pragma=busy_timeout(0)")
	repository := db.Repository(t, inboxsql.Options{})
	reader := db.Open(t)
	db.SetMaxOpenConns(1)

	// A reader's shared lock lets the claim and the write pass, and stops the commit.
	var release func()
	handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		if release == nil && msg.UUID == "1" {
			tx, err := reader.Begin()
			if err != nil {
				return err
			}
			var count int
			if err := tx.QueryRow(`SELECT count(*) FROM effects`).Scan(&count); err != nil {
				return err
			}
			release = func() { _ = tx.Rollback() }
		}
		return db.Write(msg.Context(), msg.UUID)
	})
	_, err := handler(newMessage("1"))
	var own *inbox.Error
	if !errors.As(err, &own) || own.Step != "commit" || inbox.ShouldPoison(err) {
		t.Fatalf("the error is %v, want a transient one of the commit", err)
	}
	release()
	for _, id := range []string{"2", "1", "1"} {
		if _, err := handler(newMessage(id)); err != nil {
			t.Fatalf("message %s: %v", id, err)
		}
	}
	(&app{t: t, db: db}).wantEffects("1", "2")
}

// SQLite can roll back under the handler, which goes on in autocommit.
func TestSQLiteRollsBackUnderTheHandler(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.MustExec(t, `CREATE TABLE once (id int UNIQUE ON CONFLICT ROLLBACK); INSERT INTO once VALUES (1)`)
	swallow := true
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		if err := db.Write(msg.Context(), "before"); err != nil {
			return err
		}
		tx, _ := inboxsql.TxFromContext(msg.Context())
		if swallow {
			if _, err := tx.ExecContext(msg.Context(), `INSERT INTO once VALUES (1)`); err == nil {
				t.Error("no conflict")
			}
		}
		return nil
	})
	if _, err := handler(newMessage("1")); !errors.Is(err, inbox.ErrTransactionBroken) {
		t.Fatalf("the error is %v", err)
	}
	if got := db.Count(t, `SELECT (SELECT count(*) FROM effects) + (SELECT count(*) FROM watermill_inbox)`); got != 0 {
		t.Fatalf("%d rows stay", got)
	}
	swallow = false
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	(&app{t: t, db: db}).wantEffects("before")
}

func TestSQLiteDeferredConstraint(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.SetMaxOpenConns(1)
	db.MustExec(t, `CREATE TABLE parents (id int PRIMARY KEY); CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`)
	child := true
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		if child {
			tx, _ := inboxsql.TxFromContext(msg.Context())
			_, err := tx.ExecContext(msg.Context(), `INSERT INTO children VALUES (1)`)
			return err
		}
		return db.Write(msg.Context(), msg.UUID)
	})
	_, err := handler(newMessage("1"))
	if !errors.Is(err, inbox.ErrTransactionBroken) || !inbox.ShouldPoison(err) {
		t.Fatalf("the error is %v", err)
	}
	child = false
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	if got := db.Count(t, `SELECT count(*) FROM children`); got != 0 {
		t.Fatalf("%d children", got)
	}
}

// An in-memory SQLite database lives in one connection; all steps manage with it.
func TestSQLiteInMemory(t *testing.T) {
	t.Parallel()
	pool, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	pool.SetMaxOpenConns(1)
	db := &testdb.Database{DB: pool, Driver: "sqlite", Adapter: inboxsql.DefaultSQLiteSchema{}}
	db.MustExec(t, `CREATE TABLE effects (effect text)`)
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		return db.Write(msg.Context(), msg.UUID)
	})
	for range 3 {
		if _, err := handler(newMessage("1")); err != nil {
			t.Fatal(err)
		}
	}
	(&app{t: t, db: db}).wantEffects("1")
}
