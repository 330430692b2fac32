package main

import (
	"bytes"
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A tiny run of everything. It fails when a variant has not done what it claims; no figure of time matters.
func TestBench(t *testing.T) {
	svg := filepath.Join(t.TempDir(), "chart.svg")
	options, err := parseOptions([]string{"-quick", "-svg", svg}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, options)
	ctx := t.Context()
	if err := b.run(ctx, t.Output()); err != nil {
		t.Fatal(err)
	}
	t.Run("everything was measured", func(t *testing.T) { everythingMeasured(t, b) })
	t.Run("round trips", func(t *testing.T) { tripsCounted(t, b) })
	t.Run("prefilled ids", func(t *testing.T) { prefilledIDs(t, b) })
	t.Run("report", func(t *testing.T) { reported(t, b, svg) })
	t.Run("a variant that cheats is found", func(t *testing.T) {
		b.places[0].processed.Add(1)
		if err := b.verify(ctx); err == nil {
			t.Error("a message without an effect was not noticed")
		}
	})
}

func open(t *testing.T, options options) *bench {
	t.Helper()
	b, err := newBench(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// b.run has compared the effects and the records with what was processed.
func everythingMeasured(t *testing.T, b *bench) {
	for _, p := range b.places {
		if p.processed.Load() == 0 {
			t.Errorf("%s processed nothing", p.name)
		}
	}
	subjects := 0
	for _, s := range b.sections {
		for _, g := range s.groups {
			for _, subject := range g.subjects {
				subjects++
				if len(subject.rates) == 0 || slices.Min(subject.rates) <= 0 {
					t.Errorf("%s, %s, %s: rates %v", s.name, g.setting, subject.name, subject.rates)
				}
			}
		}
	}
	settings := len(networks) * len(b.options.workers)
	const retentions, retirements = 2 * 3, 2
	if want := 2*len(variants)*settings + 4 + 2*settings + retentions + 2*len(b.options.workers) + retirements; subjects != want {
		t.Errorf("%d subjects, want %d", subjects, want)
	}
}

func tripsCounted(t *testing.T, b *bench) {
	want := map[string]float64{
		"first/plain transaction, lib/pq":             4,
		"first/hand-written inbox, lib/pq":            6,
		"first/inboxsql, lib/pq":                      5,
		"first/inboxsql, lib/pq, fused":               4,
		"first/one statement, no handler, lib/pq":     1,
		"first/plain transaction, pgx stdlib":         3,
		"first/inboxsql, pgx stdlib":                  5, // it proves before COMMIT that the transaction is still open
		"first/plain transaction, pgx":                3,
		"first/inboxpgx":                              3,
		"duplicate/plain transaction, lib/pq":         4,
		"duplicate/hand-written inbox, lib/pq":        4,
		"duplicate/inboxsql, lib/pq":                  4,
		"duplicate/inboxsql, lib/pq, fused":           3,
		"duplicate/one statement, no handler, lib/pq": 1,
		"duplicate/plain transaction, pgx stdlib":     3,
		"duplicate/inboxsql, pgx stdlib":              4,
		"duplicate/plain transaction, pgx":            3,
		"duplicate/inboxpgx":                          3,
	}
	if !maps.Equal(b.trips, want) {
		t.Errorf("round trips %v, want %v", b.trips, want)
	}
}

// The ids made in SQL are of the same kind and in the same order as those made here.
func prefilledIDs(t *testing.T, b *bench) {
	for _, p := range b.places {
		if p.prefilled.Load() == 0 {
			continue
		}
		pattern, ordered := `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, false
		if strings.HasPrefix(p.name, orderedIDs.name) {
			pattern, ordered = strings.Replace(pattern, "-4", "-7", 1), true
		}
		var ids int64
		var inOrder bool
		err := b.admin.QueryRow(`
			SELECT count(*) FILTER (WHERE message_id ~ $1), array_agg(message_id ORDER BY processed_at) = array_agg(message_id ORDER BY message_id)
			FROM (SELECT * FROM "`+p.schema+`".watermill_inbox ORDER BY processed_at LIMIT $2) AS prefilled`, pattern, p.prefilled.Load()).Scan(&ids, &inOrder)
		if err != nil {
			t.Fatal(err)
		}
		if ids != p.prefilled.Load() {
			t.Errorf("%s: %d ids match, want %d", p.name, ids, p.prefilled.Load())
		}
		if inOrder != ordered {
			t.Errorf("%s: in order: %v", p.name, inOrder)
		}
	}
}

func reported(t *testing.T, b *bench, svg string) {
	var out bytes.Buffer
	if err := b.print(&out); err != nil {
		t.Fatal(err)
	}
	t.Log(out.String())
	for _, v := range variants {
		if !strings.Contains(out.String(), v.name) {
			t.Errorf("the report lacks %s", v.name)
		}
	}
	if got, want := strings.Count(out.String(), " reached "), len(bars)-3; got != want { // three are about 16 in flight
		t.Errorf("%d bars are reported, want %d", got, want)
	}
	if err := drawChart(svg, b.chartBars()); err != nil {
		t.Fatal(err)
	}
	if chart, err := os.ReadFile(svg); err != nil || !bytes.Contains(chart, []byte("inboxpgx")) {
		t.Errorf("the chart lacks inboxpgx: %v", err)
	}
}

// A network of no use would make the bench compare nothing.
func TestNetworkDelaysOncePerRoundTrip(t *testing.T) {
	options, err := parseOptions([]string{"-quick", "-only", "^first/network/1 worker/plain transaction, lib/pq"}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, options)
	before, started := b.network.trips.Load(), time.Now()
	if err := b.run(t.Context(), t.Output()); err != nil {
		t.Fatal(err)
	}
	trips := b.network.trips.Load() - before
	if least := time.Duration(trips) * addedDelay; trips == 0 || time.Since(started) < least {
		t.Errorf("%d round trips took %s, want at least %s", trips, time.Since(started), least)
	}
}

func TestServersAreRequired(t *testing.T) {
	for _, name := range []string{"WATERMILL_TEST_POSTGRES_URL", "WATERMILL_TEST_AMQP_URI"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "")
			if _, err := newBench(context.Background(), options{}); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestSpread(t *testing.T) {
	t.Parallel()
	for want, figures := range map[spread][]float64{
		{1, 1, 1}:         {1},
		{1.25, 1.5, 1.75}: {2, 1},
		{2, 3, 4}:         {5, 1, 4, 2, 3},
	} {
		if got := spreadOf(figures); got != want {
			t.Errorf("spread of %v is %v, want %v", figures, got, want)
		}
	}
}
