package sql_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Watermill-sql's subscriber reads only what is older than every open transaction of the server, so these
// tests have a server without strangers.
func watermillSQLDatabase(t *testing.T) *testdb.Database {
	t.Helper()
	return testdb.PostgreSQLAt(t, "postgres", ownServer(t).URL())
}

func newWatermillSQLSubscriber(t *testing.T, beginner watermillsql.Beginner) *watermillsql.Subscriber {
	t.Helper()
	deadline := patience
	subscriber, err := watermillsql.NewSubscriber(beginner, watermillsql.SubscriberConfig{
		SchemaAdapter: outboxSchema, OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
		PollInterval: 10 * time.Millisecond, ResendInterval: 10 * time.Millisecond, RetryInterval: 10 * time.Millisecond,
		AckDeadline: &deadline,
	}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	return subscriber
}

// With Watermill's forwarder the publisher is the first half of an outbox to any broker.
func TestForwarder(t *testing.T) {
	t.Parallel()
	db := watermillSQLDatabase(t)
	publisher := forwarder.NewPublisher(newOutbox(t, db, "forward"), forwarder.PublisherConfig{ForwarderTopic: "forward"})
	fails := 1
	a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{Outbox: publisher})
	a.router.AddMiddleware(a.order()...)
	a.router.AddHandler("book", "payments", a.broker, "events", &recorder{}, func(msg *message.Message) ([]*message.Message, error) {
		if fails--; fails >= 0 {
			return []*message.Message{newMessage("lost")}, errors.New("fails once")
		}
		event := message.NewMessage("event-of-"+msg.UUID, []byte{0, 0xff})
		event.Metadata.Set("type", "Booked")
		return []*message.Message{event}, nil
	})
	a.run()

	outgoing := &recorder{}
	forward, err := forwarder.NewForwarder(newWatermillSQLSubscriber(t, db.Open(t)), outgoing, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: "forward"})
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- forward.Run(context.Background()) }()
	<-forward.Running()
	a.publish("payments", newMessage("1"), newMessage("1"))
	eventually(t, "the event is forwarded", func() bool { return len(outgoing.all()) > 0 })
	if err := forward.Close(); err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	got := outgoing.all()
	if len(got) != 1 || got[0].UUID != "event-of-1" || got[0].Metadata.Get("type") != "Booked" || string(got[0].Payload) != "\x00\xff" {
		t.Fatalf("forwarded %v", got)
	}
}

// consume runs a router on watermill-sql's subscriber until the done channel is closed.
func consume(t *testing.T, db *testdb.Database, repository inbox.Repository, handler message.NoPublishHandlerFunc) (stop func()) {
	t.Helper()
	m, err := inbox.NewMiddleware(repository, inbox.Options{ClaimTimeout: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(m.Middleware)
	router.AddConsumerHandler("book", "payments", newWatermillSQLSubscriber(t, db.DB), handler)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	return func() {
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	}
}

func publishPayment(t *testing.T, db *testdb.Database, id string) {
	t.Helper()
	publisher, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: outboxSchema}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	if err := publisher.Publish("payments", newMessage(id)); err != nil {
		t.Fatal(err)
	}
}

// The inbox has its own transaction beside the subscriber's. When the process dies between the two
// commits, the message comes again and is a duplicate.
func TestBesideWatermillSQLSubscriber(t *testing.T) {
	t.Parallel()
	db := watermillSQLDatabase(t)
	repository := db.Repository(t, inboxsql.Options{})
	var deliveries, runs atomic.Int32
	lostAck := errors.New("the process dies after the commit")
	faulty := inboxtest.NewFaultRepository(repository, func(point inboxtest.FaultPoint, _ inbox.Key) error {
		switch point {
		case inboxtest.BeforeClaim:
			deliveries.Add(1)
		case inboxtest.AfterCommit:
			return lostAck
		}
		return nil
	})
	processed := make(chan struct{}, 10)
	stop := consume(t, db, faulty, func(msg *message.Message) error {
		defer func() { processed <- struct{}{} }()
		runs.Add(1)
		theirs, ok := watermillsql.TxFromContext(msg.Context())
		ours, ok2 := inboxsql.TxFromContext(msg.Context())
		if !ok || !ok2 || theirs == ours {
			t.Errorf("transactions %v %v: the handler should see both, and they differ", theirs, ours)
		}
		return db.Write(msg.Context(), msg.UUID)
	})
	publishPayment(t, db, "1")
	<-processed
	eventually(t, "the second delivery is acknowledged", func() bool {
		return db.Count(t, `SELECT count(*) FROM watermill_offsets_payments WHERE offset_acked > 0`) == 1
	})
	stop()
	if got := runs.Load(); got != 1 {
		t.Errorf("the handler ran %d times", got)
	}
	if got := deliveries.Load(); got < 2 {
		t.Errorf("%d deliveries, want a second one", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM effects`); got != 1 {
		t.Errorf("%d effects", got)
	}
}

// The subscriber holds the only connection while the inbox asks for one: an error in time, not a hang.
func TestBesideWatermillSQLSubscriberOnOneConnection(t *testing.T) {
	t.Parallel()
	db := watermillSQLDatabase(t)
	repository := db.Repository(t, inboxsql.Options{})
	if err := repository.Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	other := *db
	other.DB = db.Open(t)
	failed := make(chan error, 100)
	faulty := &observedClaims{Repository: repository, failed: failed}
	stop := consume(t, db, faulty, func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
	publishPayment(t, &other, "1")
	db.SetMaxOpenConns(1)
	select {
	case err := <-failed:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the claim failed with %v", err)
		}
	case <-time.After(patience):
		t.Error("the claim hangs")
	}
	db.SetMaxOpenConns(4)
	eventually(t, "with a second connection the message is processed", func() bool {
		return other.Count(t, `SELECT count(*) FROM effects`) == 1
	})
	stop()
}

type observedClaims struct {
	inbox.Repository
	failed chan error
}

func (o *observedClaims) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := o.Repository.Claim(ctx, params)
	if err != nil {
		select {
		case o.failed <- err:
		default:
		}
	}
	return transaction, record, err
}

// Why the inbox does not join the subscriber's transaction: it is committed also when the message was not
// acknowledged. A handler that uses it is interrupted between two writes here, and the first one stays.
// Closing the router does the same when it closes the subscriber before the context has rolled back.
func TestWatermillSQLSubscriberCommitsHalfOfTheWork(t *testing.T) {
	t.Parallel()
	db := watermillSQLDatabase(t)
	for name, c := range map[string]struct {
		deadline  time.Duration
		interrupt func(*watermillsql.Subscriber) error
	}{
		"ack_deadline": {200 * time.Millisecond, func(*watermillsql.Subscriber) error { return nil }},
		"close":        {patience, (*watermillsql.Subscriber).Close},
	} {
		t.Run(name, func(t *testing.T) {
			topic := "half_" + name
			subscriber, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
				SchemaAdapter: outboxSchema, OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
				PollInterval: 10 * time.Millisecond, AckDeadline: &c.deadline,
			}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			messages, err := subscriber.Subscribe(context.Background(), topic)
			if err != nil {
				t.Fatal(err)
			}
			publisher, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: outboxSchema}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			if err := publisher.Publish(topic, newMessage("1")); err != nil {
				t.Fatal(err)
			}
			msg := <-messages
			tx, _ := watermillsql.TxFromContext(msg.Context())
			if _, err := tx.Exec(`INSERT INTO effects VALUES ($1)`, topic); err != nil {
				t.Fatal(err)
			}
			if err := c.interrupt(subscriber); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the subscriber commits without an acknowledgement", func() bool {
				return db.Count(t, `SELECT count(*) FROM effects WHERE effect = $1`, topic) == 1
			})
			if _, err := tx.Exec(`INSERT INTO effects VALUES ('second half')`); err == nil {
				t.Error("the second half was written")
			}
			_ = subscriber.Close()
		})
	}
}
