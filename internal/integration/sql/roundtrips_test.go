package sql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// countingConn counts round trips: a write after a read asks the server anew.
type countingConn struct {
	net.Conn
	trips *trips
}

type trips struct {
	mutex   sync.Mutex
	count   int
	reading bool
}

func (c *countingConn) Write(data []byte) (int, error) {
	c.trips.mutex.Lock()
	if c.trips.reading {
		c.trips.count++
		c.trips.reading = false
	}
	c.trips.mutex.Unlock()
	return c.Conn.Write(data)
}

func (c *countingConn) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	c.trips.mutex.Lock()
	c.trips.reading = true
	c.trips.mutex.Unlock()
	return n, err
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

type countingDialer struct{ trips *trips }

func (d countingDialer) Dial(network, address string) (net.Conn, error) {
	return d.DialTimeout(network, address, patience)
}

func (d countingDialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, timeout)
	return &countingConn{Conn: conn, trips: d.trips}, err
}

func (d countingDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return &countingConn{Conn: conn, trips: d.trips}, err
}

// What a message costs in round trips, through lib/pq. The effect is one statement with parameters, which
// lib/pq sends in two.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	for name, want := range map[string]struct{ plain, first, duplicate, store int }{
		"lib-pq":        {plain: 4, first: 5, duplicate: 4, store: 4},
		"lib-pq, fused": {plain: 4, first: 4, duplicate: 3, store: 3},
	} {
		t.Run(name, func(t *testing.T) {
			counted := &trips{}
			pq, err := pq.NewConnector(db.URL)
			if err != nil {
				t.Fatal(err)
			}
			pq.Dialer(countingDialer{counted})
			var connector driver.Connector = pq
			if name == "lib-pq, fused" {
				if connector, err = inboxpq.NewConnector(pq); err != nil {
					t.Fatal(err)
				}
			}
			pool := sql.OpenDB(connector)
			t.Cleanup(func() { _ = pool.Close() })
			pool.SetMaxOpenConns(1)
			repository, err := inboxsql.NewRepository(pool, inboxsql.Options{SchemaAdapter: db.Adapter})
			if err != nil {
				t.Fatal(err)
			}
			process := func(id string) func() {
				handler := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
				return func() {
					if _, err := handler(newMessage(name + id)); err != nil {
						t.Error(err)
					}
				}
			}
			process("connect and check")()

			plain := counted.during(func() {
				tx, err := pool.BeginTx(context.Background(), nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(`INSERT INTO effects VALUES ($1)`, "plain"); err != nil {
					t.Error(err)
				}
				if err := tx.Commit(); err != nil {
					t.Error(err)
				}
			})
			store := counted.during(func() {
				transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: name + "produces"}})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte("{}")}); err != nil {
					t.Error(err)
				}
				if err := transaction.Commit(context.Background()); err != nil {
					t.Error(err)
				}
			})
			for _, c := range []struct {
				what      string
				got, want int
			}{
				{"a plain transaction, for comparison", plain, want.plain},
				{"a first message", counted.during(process("1")), want.first},
				{"a duplicate with its record read back", counted.during(process("1")), want.duplicate},
				{"claim, store and commit, without an effect", store, want.store},
			} {
				t.Logf("%s: %d round trips", c.what, c.got)
				if c.got != c.want {
					t.Errorf("%s took %d round trips, want %d", c.what, c.got, c.want)
				}
			}
		})
	}
}
