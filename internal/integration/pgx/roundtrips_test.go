package pgx_test

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// trips counts round trips: a write after a read asks the server anew.
type trips struct {
	mutex   sync.Mutex
	count   int
	reading bool
}

type countingConn struct {
	net.Conn
	*trips
}

func (c countingConn) Write(data []byte) (int, error) {
	c.mutex.Lock()
	if c.reading {
		c.count++
		c.reading = false
	}
	c.mutex.Unlock()
	return c.Conn.Write(data)
}

func (c countingConn) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	c.mutex.Lock()
	c.reading = true
	c.mutex.Unlock()
	return n, err
}

func (t *trips) configure(config *pgxpool.Config) {
	oneConnection(config)
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return countingConn{conn, t}, err
	}
}

// during returns the round trips that the function takes.
func (t *trips) during(do func()) int {
	t.mutex.Lock()
	t.count, t.reading = 0, true
	t.mutex.Unlock()
	do()
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.count
}

// What a message costs in round trips. The effect is one statement with parameters, for which the pool has
// a prepared statement, or which it sends unprepared.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			counted := &trips{}
			db := newDatabase(t, counted.configure, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			repository := db.repository(t, inboxpgx.Options{})
			ctx := context.Background()

			process := func(id string) func() {
				handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return write(msg.Context(), msg.UUID) })
				return func() {
					if _, err := handler(newMessage(id)); err != nil {
						t.Error(err)
					}
				}
			}
			process("connect, check and prepare")()

			plain := counted.during(func() {
				if err := pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `INSERT INTO effects (effect) VALUES ($1)`, "plain")
					return err
				}); err != nil {
					t.Error(err)
				}
			})
			stored := inbox.Record{Key: inbox.Key{Consumer: "c", MessageID: "produces"}}
			store := counted.during(func() {
				transaction, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: stored.Key})
				if err != nil {
					t.Fatal(err)
				}
				if stored.ProcessedAt, err = transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("{}")}); err != nil {
					t.Error(err)
				}
				if err := transaction.Commit(ctx); err != nil {
					t.Error(err)
				}
			})
			for _, c := range []struct {
				what      string
				got, want int
			}{
				{"a plain transaction, for comparison", plain, 3},
				{"a first message", counted.during(process("1")), 3},
				{"a duplicate with its record read back", counted.during(process("1")), 3},
				{"claim, store and commit, without an effect", store, 3},
				{"marking as sent", counted.during(func() {
					if locked, err := repository.MarkSent(ctx, []inbox.Record{stored}); err != nil || len(locked) != 0 {
						t.Error(locked, err)
					}
				}), 1},
				{"the check", counted.during(func() {
					if err := repository.Check(ctx); err != nil {
						t.Error(err)
					}
				}), 1},
			} {
				t.Logf("%s: %d round trips", c.what, c.got)
				if c.got != c.want {
					t.Errorf("%s took %d round trips, want %d", c.what, c.got, c.want)
				}
			}
		})
	}
}

// The inbox leaves nothing in the session: no prepared statement and no setting, so that poolers work.
func TestNothingIsLeftInTheSession(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection)
	repository := db.repository(t, inboxpgx.Options{})
	handler := wrap(t, repository, inbox.Options{}, func(*message.Message) error { return nil })
	for _, id := range []string{"1", "2", "1"} {
		if _, err := handler(newMessage(id)); err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	transaction, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "produces"}})
	if err != nil {
		t.Fatal(err)
	}
	stored := inbox.Record{Key: inbox.Key{Consumer: "c", MessageID: "produces"}}
	if stored.ProcessedAt, err = transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	if err := transaction.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.ListUnsent(ctx, repository, -patience, inbox.Record{}, 10); err != nil {
		t.Fatal(err)
	}
	if locked, err := repository.MarkSent(ctx, []inbox.Record{stored}); err != nil || len(locked) != 0 {
		t.Fatal(locked, err)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 0 {
		t.Fatalf("%d records have stored messages", got)
	}
	var prepared, locks int
	err = db.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM pg_prepared_statements),
		(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')`, pgx.QueryExecModeExec).Scan(&prepared, &locks)
	if err != nil {
		t.Fatal(err)
	}
	if prepared != 0 || locks != 0 {
		t.Fatalf("%d prepared statements and %d advisory locks are left", prepared, locks)
	}
}
