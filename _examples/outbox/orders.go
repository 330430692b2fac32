package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	"github.com/devmappa/watermill-inbox/outbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A real table also has a primary key on order_id. Here it would hide orders that are booked twice.
const ordersSchema = `
SELECT pg_advisory_xact_lock(hashtext('orders schema')); -- many instances may start at once
CREATE TABLE IF NOT EXISTS orders (order_id text NOT NULL, customer text NOT NULL, amount_cents bigint NOT NULL);`

// order is the payload of a message on the topic of orders.
type order struct {
	OrderID     string `json:"order_id"`
	Customer    string `json:"customer"`
	AmountCents int64  `json:"amount_cents"`
}

// runOrders is the orders service. It books each order and announces that it did. The claim of the message,
// the booking and the announcement are committed in one transaction.
func runOrders(ctx context.Context, s settings, logger watermill.LoggerAdapter) error {
	const inFlight = 4
	db, err := sql.Open("postgres", s.postgresURL)
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(inFlight) // a message needs one: the outbox writes through the transaction
	db.SetMaxIdleConns(inFlight)
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, ordersSchema); err != nil {
		return err
	}
	if err := createOutbox(ctx, db); err != nil { // never inside of a handler's transaction
		return err
	}

	// The forwarder's publisher puts each message with its topic into an envelope, the inbox's writes the
	// envelope to the outbox table, through the transaction of the message being handled.
	table, err := outbox.NewPublisher(outbox.Options{SchemaAdapter: outboxSchema, Logger: logger})
	if err != nil {
		return err
	}
	outbox := forwarder.NewPublisher(table, forwarder.PublisherConfig{ForwarderTopic: outboxTopic})
	once, err := inbox.NewMiddleware(repository, inbox.Options{Outbox: outbox, Logger: logger})
	if err != nil {
		return err
	}

	config := amqp.NewDurableQueueConfig(s.amqpURI)
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.Connection.Reconnect = reconnect
	queues, err := amqp.NewSubscriber(config, logger)
	if err != nil {
		return err
	}
	defer queues.Close()
	subscriber, err := inboxamqp.Concurrent(queues, inFlight)
	if err != nil {
		return err
	}
	publisher, err := amqp.NewPublisher(config, logger) // of poisoned messages only
	if err != nil {
		return err
	}
	defer publisher.Close()
	poisonTopic := s.ordersTopic() + "_poison"
	if err := queues.SubscribeInitialize(poisonTopic); err != nil { // or RabbitMQ drops what is published to it
		return err
	}

	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, logger)
	if err != nil {
		return err
	}
	if err := once.AddTo(router, inbox.RouterOptions{PoisonPublisher: publisher, PoisonTopic: poisonTopic, Timeout: time.Minute}); err != nil {
		return err
	}
	// The router publishes nothing: the inbox takes what the handler returns. Should the inbox be missing,
	// the outbox refuses, because there is no transaction.
	router.AddHandler("book_order", s.ordersTopic(), subscriber, s.bookedTopic(), outbox,
		func(msg *message.Message) ([]*message.Message, error) {
			logger.Debug("Booking order", watermill.LogFields{"message_uuid": msg.UUID})
			return bookOrder(msg)
		})
	return runRouter(ctx, router, logger)
}

// bookOrder writes through the transaction of the inbox, and returns the event that belongs to it.
func bookOrder(msg *message.Message) ([]*message.Message, error) {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return nil, inbox.Permanent(fmt.Errorf("malformed order: %w", err)) // no retry can mend it
	}
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return nil, errors.New("there is no transaction: the inbox is not in the router's middleware")
	}
	if _, err := tx.ExecContext(msg.Context(), `INSERT INTO orders (order_id, customer, amount_cents) VALUES ($1, $2, $3)`,
		o.OrderID, o.Customer, o.AmountCents); err != nil {
		return nil, err
	}
	payload, err := json.Marshal(orderBooked(o))
	if err != nil {
		return nil, err
	}
	return []*message.Message{message.NewMessage(watermill.NewUUID(), payload)}, nil
}
