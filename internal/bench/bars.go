package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// bar is what a figure should reach.
type bar struct {
	section, setting, name string // of a subject; without a setting it is about round trips
	limit                  float64
}

// bars are those of the project that can be measured here. They gate nothing.
var bars = []bar{
	{first, "", inboxsqlPQ.name, 5},
	{first, "", inboxsqlFused.name, 4},
	{first, "", inboxPGX.name, 3},
	{duplicate, "", inboxsqlFused.name, 3},
	{duplicate, "", inboxPGX.name, 3},
	{first + "/" + delayed, chartSetting, inboxsqlPQ.name, 0.80},
	{first + "/" + delayed, chartSetting, inboxsqlFused.name, 0.95},
	{first + "/" + delayed, chartSetting, inboxPGX.name, 0.95},
	{growth, orderedIDs.name, filledTable, 0.80},
	{rabbitMQ + "/" + delayed, "1 in flight", inboxsqlFused.name, 0.90},
	{rabbitMQ + "/" + delayed, "4 in flight", inboxsqlFused.name, 0.90},
	{rabbitMQ + "/" + delayed, "16 in flight", inboxsqlFused.name, 0.90},
	{rabbitMQ + "/" + direct, "1 in flight", inboxsqlFused.name, 0.90},
	{rabbitMQ + "/" + direct, "4 in flight", inboxsqlFused.name, 0.90},
	{rabbitMQ + "/" + direct, "16 in flight", inboxsqlFused.name, 0.90},
}

// reached returns false when the figure was not measured.
func (b *bench) reached(bar bar) (text string, pass, measured bool) {
	if bar.setting == "" {
		trips, ok := b.trips[bar.section+"/"+bar.name]
		return fmt.Sprintf("<= %g round trips\treached %g", bar.limit, trips), trips <= bar.limit, ok
	}
	s := b.subject(bar.section, bar.setting, bar.name)
	if s == nil {
		return "", false, false
	}
	ratio := spreadOf(s.ratios())
	return fmt.Sprintf(">= %.2f\treached %s", bar.limit, ratio), ratio.median >= bar.limit, true
}

func (b *bench) printBars(out io.Writer) error {
	fmt.Fprintln(out, "\nBars")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, bar := range bars {
		text, pass, measured := b.reached(bar)
		if !measured {
			continue
		}
		verdict := "MISS"
		if pass {
			verdict = "PASS"
		}
		place := bar.section
		if bar.setting != "" {
			place += ", " + bar.setting
		}
		fmt.Fprintf(table, "  %s\t%s: %s\t%s\n", verdict, place, bar.name, text)
	}
	return table.Flush()
}
