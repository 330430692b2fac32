package main

import (
	"fmt"
	"io"
)

// result is what one run of the router came to.
type result struct {
	effects
	deliveries int64
	runs       int64
}

func printTable(out io.Writer, without, with result) {
	line := func(name string, expected, without, with any) {
		fmt.Fprintf(out, "%-24s %10v %20v %17v\n", name, expected, without, with)
	}
	expected := expected()
	line("", "expected", "without the inbox", "with the inbox")
	line("deliveries", (payments+1)*copies, without.deliveries, with.deliveries)
	line("handler runs", "", without.runs, with.runs)
	line("ledger rows", expected.rows, without.rows, with.rows)
	line("sum of the ledger", cents(expected.ledger), cents(without.ledger), cents(with.ledger))
	line("sum of the accounts", cents(expected.accounts), cents(without.accounts), cents(with.accounts))
	line("poisoned messages", expected.poisoned, without.poisoned, with.poisoned)
}

func cents(n int64) string {
	return fmt.Sprintf("%d.%02d", n/100, n%100)
}
