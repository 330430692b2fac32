package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// The kit for users' handlers on real databases: it passes a good handler and finds the bad ones.

func openSQLite(t testing.TB) *testdb.Database {
	// Short, because a handler that writes through the pool waits for it in vain.
	return testdb.SQLiteWith(t, "_pragma=busy_timeout(500)&_pragma=journal_mode(WAL)")
}

func handlerOn(t *testing.T, db *testdb.Database, options inboxsql.Options, handle message.HandlerFunc) inboxtest.Handler {
	t.Helper()
	return inboxtest.Handler{
		Repository: db.Repository(t, options),
		Handle:     handle,
		Message:    message.NewMessage("payment-7", []byte("payload")),
		State: func(ctx context.Context) (string, error) {
			effects, err := db.Effects(ctx)
			slices.Sort(effects)
			return strings.Join(effects, ", "), err
		},
	}
}

// goodHandler writes twice and returns two messages.
func goodHandler(db *testdb.Database) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if err := errors.Join(db.Write(msg.Context(), "payment"), db.Write(msg.Context(), "balance")); err != nil {
			return nil, err
		}
		return []*message.Message{
			message.NewMessage(watermill.NewUUID(), []byte("booked")),
			message.NewMessage(watermill.NewUUID(), []byte("notify")),
		}, nil
	}
}

func TestHandlerGood(t *testing.T) {
	t.Parallel()
	for name, variant := range map[string]struct {
		open    func(t testing.TB) *testdb.Database
		options inboxsql.Options
	}{
		"lib-pq": {open: func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") }},
		"lib-pq, REPEATABLE READ": {
			open:    func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			options: inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelRepeatableRead}},
		},
		"lib-pq, SERIALIZABLE": {
			open:    func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			options: inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelSerializable}},
		},
		"lib-pq, fused": {open: testdb.PostgreSQLFused},
		"pgx":           {open: func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") }},
		"SQLite":        {open: openSQLite},
		"SQLite, impatient": {open: func(t testing.TB) *testdb.Database {
			return testdb.SQLiteWith(t, "_pragma=busy_timeout(200)&_pragma=journal_mode(WAL)")
		}},
	} {
		for _, connections := range []int{1, 4} {
			t.Run(name+map[int]string{1: ", one connection", 4: ""}[connections], func(t *testing.T) {
				t.Parallel()
				inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
					db := variant.open(t)
					db.SetMaxOpenConns(connections)
					return handlerOn(t, db, variant.options, goodHandler(db))
				})
			})
		}
	}
}

// One database for all faults, emptied each time, as in the example.
func TestHandlerEmptiedTables(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
		db.MustExec(t, `TRUNCATE effects, watermill_inbox, watermill_inbox_unsent`)
		return handlerOn(t, db, inboxsql.Options{}, goodHandler(db))
	})
}

// What the handler returns goes into a table, which State reads.
func TestHandlerOutbox(t *testing.T) {
	t.Parallel()
	inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
		db := testdb.PostgreSQL(t, "postgres")
		outbox := newOutbox(t, db, "booked")
		h := handlerOn(t, db, inboxsql.Options{}, func(*message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage(watermill.NewUUID(), []byte("booked"))}, nil
		})
		h.PublishTopic = "booked"
		h.Options.Outbox = outbox
		h.State = func(ctx context.Context) (state string, err error) {
			err = db.QueryRowContext(ctx, `SELECT coalesce(string_agg(encode(payload, 'escape'), ', '), '') FROM watermill_booked`).Scan(&state)
			return state, err
		}
		return h
	})
}

func TestHandlerBad(t *testing.T) {
	t.Parallel()
	const around = "writes around its transaction"
	postgreSQL := func(driver string) func(t testing.TB) *testdb.Database {
		return func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, driver) }
	}
	lockAndWait := func(db *testdb.Database, msg *message.Message) error {
		if err := handlerTx(msg.Context(), func(tx *sql.Tx) error {
			_, err := tx.Exec(`LOCK TABLE effects`)
			return err
		}); err != nil {
			return err
		}
		_, err := db.ExecContext(msg.Context(), `INSERT INTO effects (effect) VALUES ('leaked')`)
		return err
	}
	leak := func(db *testdb.Database, msg *message.Message) error {
		if err := db.Write(msg.Context(), "payment"); err != nil {
			return err
		}
		_, err := db.ExecContext(msg.Context(), `INSERT INTO effects (effect) VALUES ('leaked')`)
		return err
	}
	leakWithoutContext := func(db *testdb.Database, msg *message.Message) error {
		_, err := db.Exec(`INSERT INTO effects (effect) VALUES ('leaked')`)
		return err
	}
	text := func(text string) func(db *testdb.Database, msg *message.Message) error {
		return func(db *testdb.Database, msg *message.Message) error {
			if err := db.Write(msg.Context(), "payment"); err != nil {
				return err
			}
			return handlerTx(msg.Context(), func(tx *sql.Tx) error {
				_, err := tx.ExecContext(msg.Context(), text)
				return err
			})
		}
	}
	for name, tc := range map[string]struct {
		open        func(t testing.TB) *testdb.Database
		connections int
		handle      func(db *testdb.Database, msg *message.Message) error
		want        []string
	}{
		"lib-pq, the pool":                {postgreSQL("postgres"), 4, leak, []string{"the handler returns an error after its work: the state has changed", around}},
		"fused, the pool":                 {testdb.PostgreSQLFused, 4, leak, []string{"the handler returns an error after its work: the state has changed", around}},
		"pgx, the pool":                   {postgreSQL("pgx"), 4, leak, []string{"the handler returns an error after its work: the state has changed", around}},
		"SQLite, the pool":                {openSQLite, 4, leak, []string{"no fault: the message is not acknowledged", "locked", around}},
		"the pool's only connection":      {postgreSQL("postgres"), 1, leak, []string{"no fault: the message is not acknowledged", "deadline exceeded", around}},
		"the pool's only one, no context": {postgreSQL("postgres"), 1, leakWithoutContext, []string{"no fault: the message is not acknowledged, and yet the state has changed", around}},
		"SQLite, the only connection":     {openSQLite, 1, leak, []string{"no fault: the message is not acknowledged", "deadline exceeded", around}},
		"a lock of its own":               {postgreSQL("postgres"), 4, lockAndWait, []string{"no fault: the message is not acknowledged", around}},
		"lib-pq, COMMIT":                  {postgreSQL("postgres"), 4, text("COMMIT"), []string{"no fault: the message is not acknowledged, and yet", "commits its transaction itself"}},
		"lib-pq, ROLLBACK":                {postgreSQL("postgres"), 4, text("ROLLBACK"), []string{"no fault: the message is not acknowledged", "ended its transaction itself"}},
		"lib-pq, COMMIT AND CHAIN":        {postgreSQL("postgres"), 4, text("COMMIT AND CHAIN"), []string{"the handler returns an error after its work: the state has changed", "commits its transaction itself"}},
		"SQLite, COMMIT":                  {openSQLite, 4, text("COMMIT"), []string{"no fault: the message is not acknowledged, and yet", "commits its transaction itself"}},
		"SQLite, ROLLBACK":                {openSQLite, 4, text("ROLLBACK"), []string{"no fault: the message is not acknowledged", "ended its transaction itself"}},
		"a failed statement": {postgreSQL("postgres"), 4, func(db *testdb.Database, msg *message.Message) error {
			_ = text("SELECT no_such_column")(db, msg)
			return nil
		}, []string{"no fault: the message is not acknowledged", "went on after a failed statement"}},
		"lib-pq, ROLLBACK AND CHAIN": {postgreSQL("postgres"), 4, func(db *testdb.Database, msg *message.Message) error {
			if err := text("ROLLBACK AND CHAIN")(db, msg); err != nil {
				return err
			}
			return db.Write(msg.Context(), "payment")
		}, []string{"a copy afterwards: the handler ran 2 times", "replaced its transaction"}},
		"SQLite, a failed statement ignored": {openSQLite, 4, func(db *testdb.Database, msg *message.Message) error {
			_ = db.Write(msg.Context(), "payment")
			return nil
		}, []string{"the transaction is lost before the work: the handler returned nil", "ignores errors"}},
		"a goroutine": {postgreSQL("postgres"), 4, func(db *testdb.Database, msg *message.Message) error {
			return handlerTx(msg.Context(), func(tx *sql.Tx) error {
				go func() {
					time.Sleep(100 * time.Millisecond)
					_, _ = tx.Exec(`INSERT INTO effects (effect) VALUES ('late')`)
				}()
				_, err := tx.Exec(`INSERT INTO effects (effect) VALUES ('payment')`)
				return err
			})
		}, []string{"the commit comes late", "late, payment", "a goroutine that the handler left behind"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failures := inboxtest.CheckHandler(t, func(t *testing.T) inboxtest.Handler {
				db := tc.open(t)
				db.SetMaxOpenConns(tc.connections)
				h := handlerOn(t, db, inboxsql.Options{}, func(msg *message.Message) ([]*message.Message, error) { return nil, tc.handle(db, msg) })
				h.Timeout = 3 * time.Second
				return h
			})
			for _, failure := range failures {
				if !slices.ContainsFunc(tc.want, func(part string) bool { return !strings.Contains(failure.Error(), part) }) {
					return
				}
			}
			t.Errorf("none of %d failures has %q:\n%v", len(failures), tc.want, errors.Join(failures...))
		})
	}
}

func handlerTx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, ok := inboxsql.TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction in the context")
	}
	return do(tx)
}
