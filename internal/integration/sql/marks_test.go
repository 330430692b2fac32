package sql_test

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
)

// marksFor may be made longer to see whether marks fall behind: -args -marks 1m.
var marksFor = flag.Duration("marks", 2*time.Second, "how long messages are processed as fast as possible")

// flood is a subscriber that has so many messages in flight, each with an id of its own.
type flood struct {
	inFlight int
	handled  atomic.Int64
	out      chan *message.Message
	closing  chan struct{}
	group    sync.WaitGroup
}

func newFlood(inFlight int) *flood {
	return &flood{inFlight: inFlight, out: make(chan *message.Message), closing: make(chan struct{})}
}

func (f *flood) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	for range f.inFlight {
		f.group.Add(1)
		go func() {
			defer f.group.Done()
			for {
				msg := message.NewMessage(watermill.NewULID(), nil)
				select {
				case f.out <- msg:
				case <-f.closing:
					return
				}
				select {
				case <-msg.Acked():
					f.handled.Add(1)
				case <-msg.Nacked():
				}
			}
		}()
	}
	return f.out, nil
}

func (f *flood) Close() error {
	close(f.closing)
	f.group.Wait()
	close(f.out)
	return nil
}

// eventsOf starts a router on the flood whose handler returns one message each, and returns how to stop it.
func eventsOf(t *testing.T, f *flood, repository inbox.Repository, options inbox.Options) (once *inbox.Middleware, stop func()) {
	t.Helper()
	once, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	if err := once.AddTo(router, inbox.RouterOptions{}); err != nil {
		t.Fatal(err)
	}
	router.AddHandler("c", "in", f, "events", &swallowing{}, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("event-of-"+msg.UUID, []byte("payload"))}, nil
	})
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(context.Background()) }()
	<-router.Running()
	return once, sync.OnceFunc(func() {
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
}

// swallowing is a publisher that takes everything.
type swallowing struct{}

func (*swallowing) Publish(string, ...*message.Message) error { return nil }
func (*swallowing) Close() error                              { return nil }

// Marks keep pace with whatever the middleware processes.
func TestMarksKeepPace(t *testing.T) {
	for _, way := range testdb.Ways {
		t.Run(way, func(t *testing.T) {
			db := testdb.PostgreSQL(t, "postgres")
			service := db.Way(t, way, db.URL, 17)
			if err := service.InitializeSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			f := newFlood(16)
			var marked, most, dropped atomic.Int64
			once, stop := eventsOf(t, f, service, inbox.Options{ObserveMarks: func(_ context.Context, o inbox.MarksObservation) {
				marked.Add(int64(o.Records))
				dropped.Add(int64(o.Dropped))
				most.Store(max(most.Load(), int64(o.Pending)))
			}})
			time.Sleep(*marksFor) // the load itself
			handled, pending := f.handled.Load(), f.handled.Load()-marked.Load()
			stop()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := once.Close(ctx); err != nil {
				t.Error(err)
			}
			rate := float64(handled) / marksFor.Seconds()
			t.Logf("%d messages in %s, %.0f a second; not marked at the end %d, at most %d waited", handled, *marksFor, rate, pending, most.Load())
			if left := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); left != 0 || dropped.Load() != 0 {
				t.Errorf("%d records are unsent in the end, %d marks were dropped", left, dropped.Load())
			}
			if float64(pending) > rate+1000 {
				t.Errorf("%d records wait for their mark, more than a second's worth", pending)
			}
		})
	}
}

// A record that somebody has locked holds up only its own mark.
func TestLockedRecordHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	for _, way := range testdb.Ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			service := db.Way(t, way, db.URL, 5)
			if err := service.InitializeSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			var records []inbox.Record
			for n := range 501 {
				transaction, _, err := service.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: fmt.Sprint(n)}})
				if err != nil {
					t.Fatal(err)
				}
				at, err := transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte("stored")})
				if err == nil {
					err = transaction.Commit(context.Background())
				}
				if err != nil {
					t.Fatal(err)
				}
				records = append(records, inbox.Record{Key: inbox.Key{Consumer: "c", MessageID: fmt.Sprint(n)}, ProcessedAt: at})
			}
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			if _, err := tx.Exec(`SELECT FROM watermill_inbox_unsent WHERE message_id = '7' FOR UPDATE`); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			locked, err := service.MarkSent(ctx, records)
			if err != nil || len(locked) != 1 || locked[0].Compare(records[7]) != 0 {
				t.Fatalf("locked are %v, %v", locked, err)
			}
			if left := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); left != 1 {
				t.Errorf("%d records are unsent", left)
			}
			if err := tx.Rollback(); err != nil {
				t.Fatal(err)
			}
			if locked, err := service.MarkSent(ctx, locked); err != nil || len(locked) != 0 {
				t.Errorf("locked are %v, %v", locked, err)
			}
		})
	}
}
