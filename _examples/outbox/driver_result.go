//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// row is a line of the table: what is to be, and what was counted.
type row struct {
	name, expected, counted string
	differs                 bool
	remark                  string
}

type result struct {
	orders int
	killed map[string]int
	rows   []row
}

// collect looks into the tables and the queues when no process is left. It takes its own time, since it also
// does so after a deadline.
func (d *driver) collect() (result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	r := result{orders: d.orders, killed: d.killed}
	if d.producer == nil {
		return r, nil
	}
	var booked, bookedOrders, events, eventOrders, invoices, invoicedOrders int
	var bookedSum, invoicedSum, owed int64
	if err := d.databases[ordersSchemaName].QueryRowContext(ctx, `
		SELECT (SELECT count(*) FROM orders), (SELECT count(DISTINCT order_id) FROM orders), (SELECT coalesce(sum(amount_cents), 0) FROM orders),
			count(*), count(DISTINCT convert_from(decode(payload->>'payload', 'base64'), 'UTF8')::json->>'order_id')
		FROM watermill_outbox`).Scan(&booked, &bookedOrders, &bookedSum, &events, &eventOrders); err != nil {
		return r, err
	}
	if err := d.databases[invoicesSchemaName].QueryRowContext(ctx, `
		SELECT count(*), count(DISTINCT order_id), coalesce(sum(amount_cents), 0), (SELECT coalesce(sum(owes_cents), 0) FROM customers)
		FROM invoices`).Scan(&invoices, &invoicedOrders, &invoicedSum, &owed); err != nil {
		return r, err
	}
	forwarded, forwardedEvents, err := d.audit()
	if err != nil {
		return r, err
	}
	var left int
	for _, role := range roles {
		n, err := d.pending(ctx, role.name)
		if err != nil {
			return r, err
		}
		left += n
	}
	var poisoned int
	for _, queue := range d.poisonQueues() {
		state, err := d.inspect(queue)
		if err != nil {
			return r, err
		}
		poisoned += state.Messages
	}

	stored := int(d.producer.stored.Load())
	logged := d.crew.tally.count
	r.exactly("orders confirmed by the broker", d.orders*d.copies, stored).
		remark = fmt.Sprintf("%d orders x %d copies; %d publishes without a confirm, repeated", d.orders, d.copies, d.producer.repeated.Load())
	runs := logged("orders", "Booking order")
	r.atLeast("runs of book_order", d.orders, runs).remark = undone(runs - booked)
	r.atLeast("orders skipped, as copies", stored-d.orders, logged("orders", "Message duplicate"))
	r.exactly("orders booked", d.orders, booked)
	r.exactly("  different ones", d.orders, bookedOrders)
	r.money("  their sum", d.producer.sum, bookedSum)
	r.exactly("events in the outbox", d.orders, events)
	r.exactly("  of different orders", d.orders, eventOrders)
	r.atLeast("events forwarded", d.orders, forwarded).remark = twice(forwarded - forwardedEvents)
	r.exactly("  different ones", d.orders, forwardedEvents)
	runs = logged("invoices", "Writing invoice")
	r.atLeast("runs of write_invoice", d.orders, runs).remark = undone(runs - invoices)
	r.atLeast("events skipped, as copies", forwarded-forwardedEvents, logged("invoices", "Message duplicate"))
	r.exactly("invoices", d.orders, invoices)
	r.exactly("  of different orders", d.orders, invoicedOrders)
	r.money("  their sum", d.producer.sum, invoicedSum)
	r.money("  what customers owe", d.producer.sum, owed)
	r.exactly("poisoned", 0, poisoned)
	r.exactly("left in queues and outbox", 0, left)
	return r, nil
}

func undone(runs int) string {
	if runs <= 0 {
		return ""
	}
	return fmt.Sprintf("%d killed half-way, rolled back", runs)
}

func twice(events int) string {
	if events == 0 {
		return ""
	}
	return fmt.Sprintf("%d forwarded again, under the same UUIDs", events)
}

// audit empties the queue that gets every event and returns how many messages there were, and how many
// different ones.
func (d *driver) audit() (messages, different int, err error) {
	seen := make(map[string]bool)
	err = d.onChannel(func(channel *amqp091.Channel) error {
		for {
			delivery, found, err := channel.Get(d.auditQueue(), true)
			if err != nil || !found {
				return err
			}
			msg, err := inboxamqp.Marshaler{}.Unmarshal(delivery)
			if err != nil {
				return err
			}
			messages++
			seen[msg.UUID] = true
		}
	})
	return messages, len(seen), err
}

func (r *result) add(row row) *row {
	r.rows = append(r.rows, row)
	return &r.rows[len(r.rows)-1]
}

func (r *result) exactly(name string, expected, counted int) *row {
	return r.add(row{name: name, expected: strconv.Itoa(expected), counted: strconv.Itoa(counted), differs: counted != expected})
}

func (r *result) atLeast(name string, expected, counted int) *row {
	return r.add(row{name: name, expected: ">= " + strconv.Itoa(expected), counted: strconv.Itoa(counted), differs: counted < expected})
}

func (r *result) money(name string, expected, counted int64) *row {
	cents := func(n int64) string { return fmt.Sprintf("%d.%02d", n/100, n%100) }
	return r.add(row{name: name, expected: cents(expected), counted: cents(counted), differs: counted != expected})
}

// print prints the table and the verdict, and returns whether that is good.
func (r *result) print(w io.Writer) bool {
	good := len(r.rows) > 0
	fmt.Fprintf(w, "\n%-30s %12s %12s\n", "", "expected", "counted")
	for _, row := range r.rows {
		if row.differs {
			good = false
			row.remark = strings.TrimSpace("<-- differs " + row.remark)
		}
		line := fmt.Sprintf("%-30s %12s %12s  %s", row.name, row.expected, row.counted, row.remark)
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	var processes int
	for _, role := range roles {
		processes += r.killed[role.name]
		fmt.Fprintf(w, "%-30s %12s %12d\n", "kills of "+role.name, "", r.killed[role.name])
	}
	fmt.Fprintf(w, "%-30s %12s %12d\n\n", "kills of the broker", "", r.killed[broker])
	if !good {
		fmt.Fprintf(w, "DIFFERENCE: not each of %d orders was booked once and invoiced once.\n", r.orders)
		return false
	}
	onTheWay := fmt.Sprintf("%d processes killed on the way", processes)
	if times := r.killed[broker]; times > 0 {
		onTheWay += fmt.Sprintf(", and the broker %d times", times)
	}
	fmt.Fprintf(w, "OK: each of %d orders was booked once and invoiced once, with %s.\n", r.orders, onTheWay)
	return true
}
