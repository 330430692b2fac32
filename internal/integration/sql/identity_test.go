package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func TestEachHandlerIsAConsumer(t *testing.T) {
	t.Parallel()
	a := newPostgreSQLApp(t)
	a.router.AddMiddleware(a.order()...)
	for _, name := range []string{"ledger", "mail"} {
		a.handle(name, "payments", func(msg *message.Message) error {
			return a.db.Write(msg.Context(), name+" "+msg.UUID)
		})
	}
	a.run()
	for range 3 {
		a.publish("payments", newMessage("1"))
	}
	a.wantEffects("ledger 1", "mail 1")
	a.wantClaims(2)
}

type paymentBooked struct{ ID string }

func TestCQRS(t *testing.T) {
	t.Parallel()
	marshaler := cqrs.JSONMarshaler{NewUUID: func() string { return "event-1" }}

	t.Run("two handlers of one event in an event processor", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		processor, err := cqrs.NewEventProcessorWithConfig(a.router, cqrs.EventProcessorConfig{
			GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
			SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
				return a.broker, nil
			},
			Marshaler: marshaler,
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"ledger", "mail"} {
			if err := processor.AddHandlers(cqrs.NewEventHandler(name, func(ctx context.Context, event *paymentBooked) error {
				return a.db.Write(ctx, name+" "+event.ID)
			})); err != nil {
				t.Fatal(err)
			}
		}
		a.run()
		publishEvent(t, a, marshaler, 3)
		a.wantEffects("ledger p", "mail p")
		a.wantClaims(2)
	})

	t.Run("two functions of one group are one consumer", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		processor, err := cqrs.NewEventGroupProcessorWithConfig(a.router, cqrs.EventGroupProcessorConfig{
			GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
			SubscriberConstructor: func(cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
				return a.broker, nil
			},
			Marshaler: marshaler,
		})
		if err != nil {
			t.Fatal(err)
		}
		var failed atomic.Bool
		if err := processor.AddHandlersGroup("group",
			cqrs.NewGroupEventHandler(func(ctx context.Context, event *paymentBooked) error {
				return a.db.Write(ctx, "first "+event.ID)
			}),
			cqrs.NewGroupEventHandler(func(ctx context.Context, event *paymentBooked) error {
				if failed.CompareAndSwap(false, true) {
					return errors.New("the second function fails")
				}
				return a.db.Write(ctx, "second "+event.ID)
			}),
		); err != nil {
			t.Fatal(err)
		}
		a.run()
		publishEvent(t, a, marshaler, 3)
		a.wantEffects("first p", "second p")
		a.wantClaims(1)
	})
}

func publishEvent(t *testing.T, a *app, marshaler cqrs.CommandEventMarshaler, copies int) {
	t.Helper()
	for range copies {
		msg, err := marshaler.Marshal(&paymentBooked{ID: "p"})
		if err != nil {
			t.Fatal(err)
		}
		a.publish("events", msg)
	}
}

func TestOneEventUnderTwoUUIDs(t *testing.T) {
	t.Parallel()
	withOrder := func(id, order string) *message.Message {
		msg := newMessage(id)
		if order != "" {
			msg.Metadata.Set("order_id", order)
		}
		return msg
	}
	t.Run("the default key takes them for two messages", func(t *testing.T) {
		t.Parallel()
		a := newPostgreSQLApp(t)
		a.router.AddMiddleware(a.order()...)
		a.handle("book", "payments", func(msg *message.Message) error { return a.db.Write(msg.Context(), msg.UUID) })
		a.run()
		a.publish("payments", withOrder("1", "order-7"), withOrder("2", "order-7"))
		a.wantEffects("1", "2")
	})
	t.Run("a key from metadata", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{MessageID: inbox.MessageIDFromMetadata("order_id")})
		a.router.AddMiddleware(a.order()...)
		a.handle("book", "payments", func(msg *message.Message) error { return a.db.Write(msg.Context(), msg.UUID) })
		a.run()
		a.publish("payments", withOrder("1", "order-7"), withOrder("2", "order-7"), withOrder("3", ""), withOrder("4", ""))
		a.wantEffects("1")
		a.wantPoisoned("3", "4")
		a.wantClaims(1)
	})
	t.Run("a key from the first source that has one", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{
			MessageID: inbox.FirstMessageID(inbox.MessageIDFromMetadata("order_id"), inbox.MessageUUID),
		})
		a.router.AddMiddleware(a.order()...)
		a.handle("book", "payments", func(msg *message.Message) error { return a.db.Write(msg.Context(), msg.UUID) })
		a.run()
		a.publish("payments", withOrder("1", "order-7"), withOrder("2", "order-7"), withOrder("3", ""), withOrder("3", ""))
		a.wantEffects("1", "3")
	})
}

// A renamed handler keeps its records.
func TestRenamedHandler(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	repository := db.Repository(t, inboxsql.Options{})
	write := func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) }

	before := newApp(t, db, repository, inbox.Options{})
	before.router.AddMiddleware(before.inbox.Middleware)
	before.handle("old", "payments", write)
	before.run()
	before.publish("payments", newMessage("1"))

	after := newApp(t, db, repository, inbox.Options{Consumer: func(handlerName string) string {
		if handlerName == "new" {
			return "old"
		}
		return handlerName
	}})
	after.router.AddMiddleware(after.inbox.Middleware)
	after.handle("new", "payments", write)
	after.run()
	after.publish("payments", newMessage("1"))
	after.wantEffects("1")
}

// The middlewares outside of the inbox see the same produced messages on a replay as on the first run.
func TestCorrelationIDOnReplay(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{PublishBackOff: time.Nanosecond}) // the first failure nacks
	a.router.AddMiddleware(middleware.CorrelationID, a.inbox.Middleware)
	events := &recorder{fails: 1}
	var runs atomic.Int32
	a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		return []*message.Message{message.NewMessage(watermill.NewUUID(), []byte("booked"))}, nil
	})
	a.run()
	msg := newMessage("1")
	middleware.SetCorrelationID("correlation-1", msg)
	a.publish("payments", msg)
	got := events.all()
	if len(got) != 1 || middleware.MessageCorrelationID(got[0]) != "correlation-1" || runs.Load() != 1 {
		t.Fatalf("%d runs, published %v", runs.Load(), got)
	}
}

// A broker inside the process may hand the handler's own context to the next handler. That one has its own
// transaction all the same, and the first one's is out of its reach once it has ended.
func TestGoChannelWithAndWithoutPreserveContext(t *testing.T) {
	t.Parallel()
	for _, preserve := range []bool{false, true} {
		t.Run(fmt.Sprintf("preserve %v", preserve), func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
			events := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true, PreserveContext: preserve}, watermill.NopLogger{})
			t.Cleanup(func() { _ = events.Close() })
			a.router.AddMiddleware(a.inbox.Middleware)
			var first, second atomic.Pointer[sql.Tx]
			a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
				tx, _ := inboxsql.TxFromContext(msg.Context())
				first.Store(tx)
				return []*message.Message{message.NewMessageWithContext(msg.Context(), "event", nil)}, db.Write(msg.Context(), "first")
			})
			a.router.AddConsumerHandler("mail", "events", events, func(msg *message.Message) error {
				tx, _ := inboxsql.TxFromContext(msg.Context())
				second.Store(tx)
				return db.Write(msg.Context(), "second")
			})
			a.run()
			a.publish("payments", newMessage("1"))
			a.wantEffects("first", "second")
			a.wantClaims(2)
			if first.Load() == nil || second.Load() == nil || first.Load() == second.Load() {
				t.Errorf("transactions %p and %p should differ", first.Load(), second.Load())
			}
		})
	}
}
