//go:build unix

package main

import (
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
)

// row is a line of the table: what the promise of the inbox makes one expect, and what was counted.
type row struct {
	name, expected, counted string
	differs                 bool
	remark                  string
}

func (r *result) table() []row {
	sent := exactly("published messages", len(r.load.messages), r.published)
	sent.remark = fmt.Sprintf("%d payments x %d copies, and %d malformed", r.payments, r.copies, malformed)

	// A process that was killed may have been given a message that it did not come to log.
	deliveries := atLeast("deliveries logged", len(r.load.messages), r.counts.deliveries)

	runs := atLeast("handler runs", r.payments+malformed, r.counts.runs)
	if undone := r.counts.runs - r.rows - malformed; undone > 0 && !r.naive {
		runs.remark = fmt.Sprintf("rolled back half-way: %d", undone)
	}

	duplicates := atLeast("duplicates skipped", r.payments*(r.copies-1), r.counts.duplicates)
	if r.naive {
		duplicates = row{name: duplicates.name, counted: duplicates.counted}
	}

	poison := exactly("poison queue messages", malformed, len(r.poisoned))
	poison.differs = !maps.Equal(r.poisoned, r.load.malformed)

	return []row{
		sent,
		deliveries,
		runs,
		duplicates,
		exactly("ledger rows", r.payments, r.rows),
		money("sum of the ledger", r.load.sum, r.booked),
		money("sum of the accounts", r.load.sum, r.balances),
		poison,
		exactly("left in the queue", 0, r.left),
	}
}

func (r *result) print(w io.Writer) {
	fmt.Fprintf(w, "\n%-22s %14s %14s\n", "", "expected", "counted")
	for _, row := range r.table() {
		if row.differs {
			row.remark = "<-- differs"
		}
		line := fmt.Sprintf("%-22s %14s %14s  %s", row.name, row.expected, row.counted, row.remark)
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	verdict, _ := r.verdict()
	fmt.Fprintf(w, "\n%s\n", verdict)
}

func exactly(name string, expected, counted int) row {
	return row{name: name, expected: strconv.Itoa(expected), counted: strconv.Itoa(counted), differs: counted != expected}
}

func atLeast(name string, expected, counted int) row {
	return row{name: name, expected: ">= " + strconv.Itoa(expected), counted: strconv.Itoa(counted), differs: counted < expected}
}

func money(name string, expected, counted int64) row {
	return row{name: name, expected: cents(expected), counted: cents(counted), differs: counted != expected}
}

func cents(n int64) string {
	return fmt.Sprintf("%d.%02d", n/100, n%100)
}
