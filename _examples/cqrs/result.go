package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
)

// placed is what was published and what the handlers were given.
type placed struct {
	*counts
	orders int
	cents  int64 // sum of the orders
	events int64 // published by a handler
}

// report prints the tables and returns an error when something is not as it is to be.
func report(ctx context.Context, out io.Writer, db *sql.DB, p *placed) error {
	fmt.Fprintf(out, "%-16s %10s %6s %7s %14s\n", "handler", "deliveries", "runs", "undone", "copies skipped")
	for _, handler := range []string{"reserve_stock", "write_invoice", "loyalty", "book_revenue"} {
		c := p.get(handler)
		fmt.Fprintf(out, "%-16s %10d %6d %7d %14d\n", handler, c.deliveries, c.runs, c.failed, c.deliveries-(c.runs-c.failed))
	}

	orders := int64(p.orders)
	var differs bool
	fmt.Fprintf(out, "\n%-34s %10s %10s\n", "effect", "expected", "counted")
	for _, row := range []struct {
		name     string
		expected int64
		query    string
	}{
		{"reservations", orders, `SELECT count(*) FROM reservations`},
		{"invoices", orders, `SELECT count(*) FROM invoices`},
		{"  their sum", p.cents, `SELECT coalesce(sum(cents), 0) FROM invoices`},
		{"events published by write_invoice", orders, `SELECT count(*) FROM "watermill_InvoiceWritten"`},
		{"revenue booked from these events", orders, `SELECT count(*) FROM revenue`},
		{"  its sum", p.cents, `SELECT coalesce(sum(cents), 0) FROM revenue`},
		{"points, by the group's first", p.cents, `SELECT coalesce(sum(points), 0) FROM points`},
		{"statements, by its second", orders, `SELECT count(*) FROM statements`},
		{"different orders in all of them", orders, `SELECT count(*) FROM (
			SELECT order_id FROM reservations INTERSECT SELECT order_id FROM invoices INTERSECT
			SELECT order_id FROM revenue INTERSECT SELECT order_id FROM statements) AS complete`},
		{"poisoned", 0, `SELECT count(*) FROM watermill_poison`},
	} {
		counted, err := count(ctx, db, row.query)
		if err != nil {
			return err
		}
		remark := ""
		if counted != row.expected {
			differs, remark = true, "  <-- differs"
		}
		fmt.Fprintf(out, "%-34s %10d %10d%s\n", row.name, row.expected, counted, remark)
	}
	// Without the two failures the table would prove little.
	if p.get("write_invoice").failed == 0 || p.get("loyalty").failed == 0 {
		return errors.New("a handler that was to fail has not")
	}
	if differs {
		fmt.Fprintf(out, "\nDIFFERENCE: not everything happened once for each of %d orders.\n", p.orders)
		return errors.New("the effects differ from what is expected")
	}
	fmt.Fprintf(out, "\nOK: everything happened once for each of %d orders, and nothing stayed of the attempts that failed.\n", p.orders)
	return nil
}
