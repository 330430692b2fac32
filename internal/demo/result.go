//go:build unix

package main

import (
	"context"
	"database/sql"
	"fmt"

	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// result is what was sent and what came of it.
type result struct {
	options
	load       load
	counts     counts
	published  int
	unfinished bool

	rows     int   // in the ledger
	twice    int   // payments with more than one row
	missing  int   // payments without a row
	booked   int64 // sum of the ledger, in cents
	balances int64 // sum of the accounts, in cents
	poisoned map[string]bool
	left     int
}

// collect looks into the ledger and the queues when no consumer is left. It takes its own time, since
// it also does so after a deadline.
func (r *result) collect(s *stage) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	if err := r.collectLedger(ctx, s); err != nil {
		return fmt.Errorf("reading the ledger: %w", err)
	}
	if err := r.collectPoison(s); err != nil {
		return fmt.Errorf("reading the poison queue: %w", err)
	}
	r.published = int(s.published.Load())
	var err error
	r.left, err = s.left(ctx)
	return err
}

func (r *result) collectLedger(ctx context.Context, s *stage) error {
	db, err := sql.Open("postgres", s.postgresURL)
	if err != nil {
		return err
	}
	defer db.Close()
	var different int
	err = db.QueryRowContext(ctx, `
		WITH booked AS (SELECT count(*) AS rows, sum(amount_cents) AS cents FROM payments GROUP BY payment_id)
		SELECT count(*), count(*) FILTER (WHERE rows > 1), coalesce(sum(rows), 0), coalesce(sum(cents), 0),
			(SELECT coalesce(sum(balance_cents), 0) FROM accounts)
		FROM booked`).Scan(&different, &r.twice, &r.rows, &r.booked, &r.balances)
	r.missing = r.payments - different
	return err
}

// collectPoison reads the ids of the messages in the poison queue. One of them can be there twice: a
// consumer that is killed between the publish and the acknowledgement does both again.
func (r *result) collectPoison(s *stage) error {
	r.poisoned = make(map[string]bool)
	return s.onChannel(func(channel *amqp091.Channel) error {
		for {
			delivery, found, err := channel.Get(s.poisonQueue(), true)
			if err != nil || !found {
				return err
			}
			msg, err := inboxamqp.Marshaler{}.Unmarshal(delivery)
			if err != nil {
				return err
			}
			r.poisoned[msg.UUID] = true
		}
	})
}

// verdict is the result in words, and whether every payment was booked once.
func (r *result) verdict() (string, bool) {
	ok := true
	for _, row := range r.table() {
		ok = ok && !row.differs
	}
	switch {
	case r.unfinished:
		return "NOT FINISHED: this is how far it came.", false
	case ok && r.naive:
		return "NO DIFFERENCE this time: without the inbox it takes a copy or a redelivery to charge twice.", true
	case ok:
		return fmt.Sprintf("OK: each of %d payments was booked once.", r.payments), true
	case r.naive && r.twice > 0:
		return fmt.Sprintf("DOUBLE CHARGE: without the inbox, %d of %d payments booked more than once, %s too much in all.\n"+
			"That is what at-least-once delivery does to a handler that cannot tell a copy.",
			r.twice, r.payments, cents(r.booked-r.load.sum)), false
	}
	return fmt.Sprintf("DIFFERENCE: %d of %d payments booked more than once, %d not at all.",
		r.twice, r.payments, r.missing), false
}
