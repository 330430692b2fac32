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
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A real table also has a primary key on order_id. Here it would hide orders that are invoiced twice.
const invoicesSchema = `
SELECT pg_advisory_xact_lock(hashtext('invoices schema'));
CREATE TABLE IF NOT EXISTS invoices (order_id text NOT NULL, customer text NOT NULL, amount_cents bigint NOT NULL);
CREATE TABLE IF NOT EXISTS customers (customer text PRIMARY KEY, owes_cents bigint NOT NULL);`

// orderBooked is the payload of an event.
type orderBooked struct {
	OrderID     string `json:"order_id"`
	Customer    string `json:"customer"`
	AmountCents int64  `json:"amount_cents"`
}

// runInvoices is the invoices service: it writes an invoice for each order that was booked. It has an inbox of
// its own, because the forwarder may publish an event twice and RabbitMQ may deliver it twice.
func runInvoices(ctx context.Context, s settings, logger watermill.LoggerAdapter) error {
	const inFlight = 4
	db, err := sql.Open("postgres", s.postgresURL)
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(inFlight)
	db.SetMaxIdleConns(inFlight)
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, invoicesSchema); err != nil {
		return err
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
	if err != nil {
		return err
	}

	config := eventsConfig(s, "invoices")
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
	poisonTopic := s.bookedTopic() + "_poison"
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
	router.AddConsumerHandler("write_invoice", s.bookedTopic(), subscriber, func(msg *message.Message) error {
		logger.Debug("Writing invoice", watermill.LogFields{"message_uuid": msg.UUID})
		return writeInvoice(msg)
	})
	return runRouter(ctx, router, logger)
}

// writeInvoice writes through the transaction of the inbox.
func writeInvoice(msg *message.Message) error {
	var event orderBooked
	if err := json.Unmarshal(msg.Payload, &event); err != nil {
		return inbox.Permanent(fmt.Errorf("malformed event: %w", err)) // no retry can mend it
	}
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return errors.New("there is no transaction: the inbox is not in the router's middleware")
	}
	if _, err := tx.ExecContext(msg.Context(), `INSERT INTO invoices (order_id, customer, amount_cents) VALUES ($1, $2, $3)`,
		event.OrderID, event.Customer, event.AmountCents); err != nil {
		return err
	}
	_, err := tx.ExecContext(msg.Context(), `INSERT INTO customers (customer, owes_cents) VALUES ($1, $2)
		ON CONFLICT (customer) DO UPDATE SET owes_cents = customers.owes_cents + excluded.owes_cents`,
		event.Customer, event.AmountCents)
	return err
}
