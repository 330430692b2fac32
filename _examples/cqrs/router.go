package main

import (
	"context"
	"database/sql"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/outbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

var (
	marshaler = cqrs.JSONMarshaler{GenerateName: cqrs.StructName}

	// The payload column is JSON by default, which fits this marshaler. UUIDs have at most 36 characters. The
	// subscriber's transaction is open for a batch, and holds up the events that are younger: keep it short.
	schemaAdapter  = watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 10}
	offsetsAdapter = watermillsql.DefaultPostgreSQLOffsetsAdapter{}
)

const poisonTopic = "poison"

// createTables creates the handlers' tables and those of the topics, since the handlers' transactions create
// nothing.
func createTables(ctx context.Context, db *sql.DB) error {
	statements := []string{tables}
	for _, topic := range []string{marshaler.Name(OrderPlaced{}), marshaler.Name(InvoiceWritten{}), poisonTopic} {
		for _, query := range append(schemaAdapter.SchemaInitializingQueries(topic), offsetsAdapter.SchemaInitializingQueries(topic)...) {
			statements = append(statements, query.Query)
		}
	}
	for _, statement := range statements {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// newRouter is what one copies.
func newRouter(ctx context.Context, db *sql.DB, counts *counts) (*message.Router, error) {
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return nil, err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return nil, err
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{})
	if err != nil {
		return nil, err
	}
	poisoned, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: schemaAdapter}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	router.AddMiddleware(counts.Deliveries) // for this story, outside of all
	if err := once.AddTo(router, inbox.RouterOptions{
		PoisonPublisher: poisoned, PoisonTopic: poisonTopic,
		Retry:   middleware.Retry{MaxRetries: 3, InitialInterval: 10 * time.Millisecond, Multiplier: 2, MaxInterval: time.Second},
		Timeout: 20 * time.Second, // of one attempt; less than the subscribers' AckDeadline
	}); err != nil {
		return nil, err
	}
	router.AddMiddleware(counts.Runs) // for this story, inside of the transaction

	// Inside of a handler: an event bus that publishes through the handler's transaction.
	transactional, err := outbox.NewPublisher(outbox.Options{SchemaAdapter: schemaAdapter})
	if err != nil {
		return nil, err
	}
	events, err := cqrs.NewEventBusWithConfig(transactional, cqrs.EventBusConfig{
		GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) { return params.EventName, nil },
		Marshaler:            marshaler,
	})
	if err != nil {
		return nil, err
	}
	shop := &shop{events: events}

	// A handler's name is the name of its router handler, so of its consumer in the inbox: each handler has each
	// event once. It is also its consumer group, so that each is given all events.
	processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(params cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
			return params.EventName, nil
		},
		SubscriberConstructor: func(params cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return newSubscriber(db, params.HandlerName)
		},
		Marshaler: marshaler,
	})
	if err != nil {
		return nil, err
	}
	if err := processor.AddHandlers(
		cqrs.NewEventHandler("reserve_stock", shop.ReserveStock),
		cqrs.NewEventHandler("write_invoice", shop.WriteInvoice),
		cqrs.NewEventHandler("book_revenue", shop.BookRevenue),
	); err != nil {
		return nil, err
	}

	// A group is one router handler: its functions share the claim and the transaction of each event.
	groups, err := cqrs.NewEventGroupProcessorWithConfig(router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) {
			return marshaler.Name(OrderPlaced{}), nil
		},
		SubscriberConstructor: func(params cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return newSubscriber(db, params.EventGroupName)
		},
		Marshaler: marshaler,
	})
	if err != nil {
		return nil, err
	}
	return router, groups.AddHandlersGroup("loyalty",
		cqrs.NewGroupEventHandler(shop.AddPoints),
		cqrs.NewGroupEventHandler(shop.WriteStatement),
	)
}

// newSubscriber reads a topic's table. It has a transaction of its own around each batch; the handler must not
// write through that one, because it is also committed for events that were not acknowledged.
func newSubscriber(db *sql.DB, consumerGroup string) (message.Subscriber, error) {
	return watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
		ConsumerGroup:  consumerGroup,
		SchemaAdapter:  schemaAdapter,
		OffsetsAdapter: offsetsAdapter,
		PollInterval:   20 * time.Millisecond,
		ResendInterval: 100 * time.Millisecond,
		RetryInterval:  100 * time.Millisecond,
	}, watermill.NopLogger{})
}
