package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"

	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// OrderPlaced is an event that comes from outside.
type OrderPlaced struct {
	Order    int    `json:"order"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// InvoiceWritten is an event that a handler publishes.
type InvoiceWritten struct {
	Order int   `json:"order"`
	Cents int64 `json:"cents"`
}

// Real tables also have unique keys. Here they would hide what is written twice.
const tables = `
CREATE TABLE reservations (order_id bigint NOT NULL);
CREATE TABLE invoices (order_id bigint NOT NULL, cents bigint NOT NULL);
CREATE TABLE revenue (order_id bigint NOT NULL, cents bigint NOT NULL);
CREATE TABLE points (customer text PRIMARY KEY, points bigint NOT NULL);
CREATE TABLE statements (order_id bigint NOT NULL);`

// failingOrder is the order with which two handlers fail once.
const failingOrder = 3

// shop is the application's event handlers. They write through the transaction of the inbox, which is in the
// context that cqrs gives them.
type shop struct {
	events *cqrs.EventBus // on outbox.Publisher
	failed sync.Map
}

func (s *shop) ReserveStock(ctx context.Context, event *OrderPlaced) error {
	return exec(ctx, `INSERT INTO reservations VALUES ($1)`, event.Order)
}

// WriteInvoice publishes an event. The event bus keeps the context on the message, so the publisher finds the
// transaction: the event is there if and only if the invoice is.
func (s *shop) WriteInvoice(ctx context.Context, event *OrderPlaced) error {
	if err := exec(ctx, `INSERT INTO invoices VALUES ($1, $2)`, event.Order, event.Cents); err != nil {
		return err
	}
	if err := s.events.Publish(ctx, InvoiceWritten{Order: event.Order, Cents: event.Cents}); err != nil {
		return err
	}
	if s.failsNow("write_invoice", event.Order) {
		panic("a bug that shows now and then")
	}
	return nil
}

func (s *shop) BookRevenue(ctx context.Context, event *InvoiceWritten) error {
	return exec(ctx, `INSERT INTO revenue VALUES ($1, $2)`, event.Order, event.Cents)
}

// AddPoints and WriteStatement are a group: two functions of one message, so one claim and one transaction.
func (s *shop) AddPoints(ctx context.Context, event *OrderPlaced) error {
	return exec(ctx, `INSERT INTO points VALUES ($1, $2)
		ON CONFLICT (customer) DO UPDATE SET points = points.points + excluded.points`, event.Customer, event.Cents)
}

func (s *shop) WriteStatement(ctx context.Context, event *OrderPlaced) error {
	if s.failsNow("write_statement", event.Order) {
		return errors.New("another service did not answer") // the points are undone as well
	}
	return exec(ctx, `INSERT INTO statements VALUES ($1)`, event.Order)
}

func (s *shop) failsNow(function string, order int) bool {
	if order != failingOrder {
		return false
	}
	_, failedBefore := s.failed.LoadOrStore(function, true)
	return !failedBefore
}

func exec(ctx context.Context, query string, args ...any) error {
	tx, ok := inboxsql.TxFromContext(ctx)
	if !ok {
		return errors.New("there is no transaction: the inbox is not in the router's middleware")
	}
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

func count(ctx context.Context, db *sql.DB, query string) (n int64, err error) {
	err = db.QueryRowContext(ctx, query).Scan(&n)
	return n, err
}
