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
	kind                   barKind
}

type barKind int

const (
	ratioAtLeast barKind = iota
	ratioAtMost
	figureAtMost // in the section's unit
)

// bars are those of the project that can be measured here. They gate nothing.
var bars = []bar{
	{first, "", inboxsqlPQ.name, 5, ratioAtLeast},
	{first, "", inboxsqlFused.name, 4, ratioAtLeast},
	{first, "", inboxPGX.name, 3, ratioAtLeast},
	{duplicate, "", inboxsqlFused.name, 3, ratioAtLeast},
	{duplicate, "", inboxPGX.name, 3, ratioAtLeast},
	{first + "/" + delayed, chartSetting, inboxsqlPQ.name, 0.80, ratioAtLeast},
	{first + "/" + delayed, chartSetting, inboxsqlFused.name, 0.95, ratioAtLeast},
	{first + "/" + delayed, chartSetting, inboxPGX.name, 0.95, ratioAtLeast},
	{growth, orderedIDs.name, filledTable, 0.80, ratioAtLeast},
	{rabbitMQ + "/" + delayed, "1 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{rabbitMQ + "/" + delayed, "4 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{rabbitMQ + "/" + delayed, "16 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{rabbitMQ + "/" + direct, "1 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{rabbitMQ + "/" + direct, "4 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{rabbitMQ + "/" + direct, "16 in flight", inboxsqlFused.name, 0.90, ratioAtLeast},
	{retention, claimP50, defaultCleaner, 3, ratioAtMost},
	{retention, claimP99, defaultCleaner, 3, ratioAtMost},
	{retention, claimP50, gentleCleaner, 1.3, ratioAtMost},
	{partitioned, workersSetting(1), partitionedTable, 0.95, ratioAtLeast},
	{partitioned, workersSetting(4), partitionedTable, 0.95, ratioAtLeast},
	{partitioned, workersSetting(16), partitionedTable, 0.95, ratioAtLeast},
	{retirement, longestClaim, retiring, 100, figureAtMost},
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
	switch bar.kind {
	case ratioAtMost:
		return fmt.Sprintf("<= %.2f\treached %s", bar.limit, ratio), ratio.median <= bar.limit, true
	case figureAtMost:
		figure := spreadOf(s.rates)
		return fmt.Sprintf("<= %g\treached %s", bar.limit, figure), figure.median <= bar.limit, true
	}
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
