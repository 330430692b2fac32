package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// print writes a table per section, and the bars.
func (b *bench) print(out io.Writer) error {
	fmt.Fprint(out, "\nEach figure is the rate, or the latency, relative to the baseline above it, \"= n/s\", of the same round: the median of these\n"+
		"ratios and their quartiles. RT: round trips per message, counted on the wire.\n")
	for _, section := range b.sections {
		if err := b.printSection(out, section); err != nil {
			return err
		}
	}
	return b.printBars(out)
}

func (b *bench) printSection(out io.Writer, s *section) error {
	kind, _, _ := strings.Cut(s.name, "/")
	fmt.Fprintf(out, "\n%s\n", s.title)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	header := []string{"  "}
	counted := kind == first || kind == duplicate
	if counted {
		header = append(header, "RT")
	}
	for _, g := range s.groups {
		header = append(header, g.setting)
	}
	fmt.Fprintln(table, strings.Join(header, "\t"))
	for _, row := range rows(s) {
		cells := []string{"  " + row}
		if counted {
			cells = append(cells, fmt.Sprintf("%g", b.trips[kind+"/"+row]))
		}
		for _, g := range s.groups {
			cells = append(cells, g.cell(row, cmp.Or(s.unit, "/s")))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, note := range s.notes {
		if text := note(); text != "" {
			fmt.Fprintln(out, "  "+text)
		}
	}
	return nil
}

// rows are the names of the subjects, each once, in the order of the longest column.
func rows(s *section) []string {
	longest := slices.MaxFunc(s.groups, func(a, b *group) int { return cmp.Compare(len(a.subjects), len(b.subjects)) })
	var names []string
	for _, g := range append([]*group{longest}, s.groups...) {
		for _, subject := range g.subjects {
			if !slices.Contains(names, subject.name) {
				names = append(names, subject.name)
			}
		}
	}
	return names
}

func (g *group) cell(row, unit string) string {
	for _, s := range g.subjects {
		switch {
		case s.name != row:
		case s.baseline == nil:
			return fmt.Sprintf("= %.4g%s", spreadOf(s.rates).median, unit)
		default:
			return spreadOf(s.ratios()).String()
		}
	}
	return ""
}
