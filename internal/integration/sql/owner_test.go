package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// codeError has a code of something else than SQLite, with the low byte of "busy".
type codeError struct{}

func (codeError) Error() string { return "limit exceeded" }
func (codeError) Code() int     { return 1029 }

// TestBadMessageIsPoisoned: what only the message or its handler can cause ends in the poison queue, whatever it does to
// the connection.
func TestBadMessageIsPoisoned(t *testing.T) {
	t.Parallel()
	all := []string{"postgres", "fused", "pgx", "sqlite"}
	servers := []string{"postgres", "fused", "pgx"}
	fused := []string{"fused"} // which ends a COPY that lib/pq alone trips over
	startCopy := func(tx *sql.Tx) error {
		copyIn, err := tx.Prepare(`COPY effects (effect) FROM STDIN`)
		if err == nil {
			_, err = copyIn.Exec("copied")
		}
		return err
	}
	leaveRows := func(tx *sql.Tx) error {
		rows, err := tx.Query(`SELECT generate_series(1, 100000)`)
		if err == nil {
			rows.Next()
		}
		return err
	}
	for name, c := range map[string]struct {
		drivers []string
		handle  func(ctx context.Context, tx *sql.Tx) error
		returns bool // a message as well
		outbox  bool // which refuses it
	}{
		"an error while COPY is open": {drivers: fused, handle: func(_ context.Context, tx *sql.Tx) error {
			return errors.Join(startCopy(tx), errors.New("no funds"))
		}},
		"COPY left open": {drivers: fused, handle: func(_ context.Context, tx *sql.Tx) error { return startCopy(tx) }},
		"an error while rows are open": {drivers: servers, handle: func(_ context.Context, tx *sql.Tx) error {
			return errors.Join(leaveRows(tx), errors.New("no funds"))
		}},
		"rows left open": {drivers: []string{"pgx"}, handle: func(_ context.Context, tx *sql.Tx) error { return leaveRows(tx) }},
		"its own time limit": {drivers: all, handle: func(ctx context.Context, _ *sql.Tx) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			<-ctx.Done()
			return fmt.Errorf("fetch: %w", ctx.Err())
		}},
		"its own time limit of a statement": {drivers: servers, handle: func(ctx context.Context, tx *sql.Tx) error {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, err := tx.ExecContext(ctx, `SELECT pg_sleep(60)`)
			return err
		}},
		"a missing file": {drivers: servers, handle: func(_ context.Context, tx *sql.Tx) error {
			_, err := tx.Exec(`SELECT pg_read_file('no-such-file')`)
			return err
		}},
		"a code of something else": {drivers: all, handle: func(context.Context, *sql.Tx) error { return codeError{} }},
		"a port that is none": {drivers: all, handle: func(ctx context.Context, _ *sql.Tx) error {
			_, err := (&net.Dialer{}).DialContext(ctx, "tcp", "127.0.0.1:99999")
			return err
		}},
		"another role, and a message": {drivers: servers, returns: true, handle: func(_ context.Context, tx *sql.Tx) error {
			_, err := tx.Exec(`SET LOCAL ROLE pg_monitor`)
			return err
		}},
		"a message that the outbox refuses": {drivers: servers, returns: true, outbox: true, handle: func(context.Context, *sql.Tx) error { return nil }},
	} {
		for _, driver := range c.drivers {
			t.Run(name+", "+driver, func(t *testing.T) {
				t.Parallel()
				db := openDriver(t, driver)
				options := inbox.Options{}
				if c.outbox {
					options.Outbox = narrowOutbox{}
				}
				app := newApp(t, db, db.Repository(t, inboxsql.Options{}), options)
				app.router.AddMiddleware(app.order()...)
				app.router.AddHandler("handler", "in", app.broker, "out", &recorder{}, func(msg *message.Message) ([]*message.Message, error) {
					if string(msg.Payload) == "good" {
						return nil, db.Write(msg.Context(), "good")
					}
					tx, _ := inboxsql.TxFromContext(msg.Context())
					if err := c.handle(msg.Context(), tx); err != nil || !c.returns {
						return nil, err
					}
					return []*message.Message{newMessage("event")}, nil
				})
				app.run()
				app.publish("in", newMessage("bad"), newMessage("good"))
				t.Log(app.wantPoisoned("bad")[0].Metadata.Get("reason_poisoned"))
				app.wantEffects("good")
				app.wantClaims(1)
			})
		}
	}
}

func openDriver(t *testing.T, driver string) *testdb.Database {
	t.Helper()
	if driver == "sqlite" {
		return openSQLite(t)
	}
	return testdb.PostgreSQL(t, driver)
}

// narrowOutbox has a column that takes UUIDs only.
type narrowOutbox struct{}

func (narrowOutbox) Publish(_ string, messages ...*message.Message) error {
	tx, _ := inboxsql.TxFromContext(messages[0].Context())
	_, err := tx.Exec(`SELECT $1::uuid`, messages[0].UUID)
	return err
}

func (narrowOutbox) Close() error { return nil }
