package main

import (
	"context"
	"database/sql"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

const outboxTopic = "outbox" // the table is watermill_outbox

// The payload column is JSON by default. That fits: the forwarder's envelope is JSON, whatever is in it. Rows
// stay in the table; delete those that every consumer group of watermill_offsets_outbox has passed.
var (
	outboxSchema  = watermillsql.DefaultPostgreSQLSchema{}
	outboxOffsets = watermillsql.DefaultPostgreSQLOffsetsAdapter{}
)

// createOutbox creates the tables of the outbox, for the service that writes and the forwarder that reads.
func createOutbox(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	// CREATE TABLE IF NOT EXISTS fails when two run it at once.
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(hashtext('outbox schema'))`); err != nil {
		return err
	}
	queries := append(outboxSchema.SchemaInitializingQueries(outboxTopic), outboxOffsets.SchemaInitializingQueries(outboxTopic)...)
	for _, query := range queries {
		if _, err := tx.ExecContext(ctx, query.Query, query.Args...); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// runForwarder carries the events from the outbox table to RabbitMQ, at least once: killed after a publish and
// before the commit of its position, it publishes again, under the same UUIDs. Of several instances one works
// and the others wait for its lock.
func runForwarder(ctx context.Context, s settings, logger watermill.LoggerAdapter) error {
	db, err := sql.Open("postgres", s.postgresURL)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := createOutbox(ctx, db); err != nil {
		return err
	}

	// Reading is a transaction that is open until the batch is published, and while RabbitMQ is away. It also
	// reads only what is older than every open transaction of the server, so a long one holds events up.
	// The deadline bounds both.
	ackDeadline := 10 * time.Second
	subscriber, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
		ConsumerGroup:  "forwarder",
		SchemaAdapter:  outboxSchema,
		OffsetsAdapter: outboxOffsets,
		AckDeadline:    &ackDeadline,
		PollInterval:   50 * time.Millisecond,  // the delay of an event that finds the forwarder idle
		ResendInterval: 200 * time.Millisecond, // between attempts to publish
		RetryInterval:  200 * time.Millisecond, // after an error of the database
	}, logger)
	if err != nil {
		return err
	}
	defer subscriber.Close()

	config := eventsConfig(s, "")
	publisher, err := amqp.NewPublisher(config, logger)
	if err != nil {
		return err
	}
	defer publisher.Close()

	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, logger)
	if err != nil {
		return err
	}
	// An event that cannot be published is not acknowledged, and those behind it wait: their order is kept.
	if _, err := forwarder.NewForwarder(subscriber, publisher, logger, forwarder.Config{
		ForwarderTopic: outboxTopic, Router: router,
	}); err != nil {
		return err
	}
	return runRouter(ctx, router, logger)
}

// eventsConfig has an exchange for each topic of events and, in it, a queue for each service that subscribes.
func eventsConfig(s settings, service string) amqp.Config {
	config := amqp.NewDurablePubSubConfig(s.amqpURI, amqp.GenerateQueueNameTopicNameWithSuffix(service))
	config.Marshaler = inboxamqp.Marshaler{}
	// An event leaves the outbox when Publish returns nil: then RabbitMQ must have stored it. RabbitMQ also
	// confirms what no queue is bound to, and drops it, so subscribers are deployed before publishers.
	config.Publish.ConfirmDelivery = true
	config.Connection.Reconnect = reconnect
	return config
}
