package inboxsql

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
)

var kinds = []IDKind{UUIDv7, ULID}

// A bound is the first id of its millisecond, and bounds are in the order of their times.
func TestBound(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	times := []time.Time{time.UnixMilli(0), time.UnixMilli(1), noon, noon.Add(time.Millisecond), noon.Add(24 * time.Hour), lastTime}
	for _, kind := range kinds {
		before := ""
		for _, at := range times {
			bound := kind.Bound(at)
			if got, ok := kind.Time(bound); !ok || !got.Equal(at) {
				t.Errorf("%s: the bound of %s is %s, of %s", kind, at, bound, got)
			}
			if bound <= before {
				t.Errorf("%s: %s is not above %s", kind, bound, before)
			}
			before = bound
		}
		if kind.Bound(time.Unix(-1, 0)) != kind.Bound(time.UnixMilli(0)) || kind.Bound(lastTime.Add(time.Hour)) != kind.Bound(lastTime) {
			t.Errorf("%s: times without an id have another bound", kind)
		}
	}
	if got := UUIDv7.Bound(noon); got != "01a23179-de00-7000-8000-000000000000" {
		t.Errorf("noon is %s", got)
	}
}

var planNow = time.Date(2026, 12, 1, 12, 30, 0, 0, time.UTC)

func day(n int) time.Time { return time.Date(2026, 12, n, 0, 0, 0, 0, time.UTC) }

func days(from, to int) idRange { return idRange{UUIDv7.Bound(day(from)), UUIDv7.Bound(day(to))} }

func attached(ranges ...idRange) []partition {
	partitions := make([]partition, len(ranges))
	for i, r := range ranges {
		partitions[i] = partition{idRange: r, attached: true}
	}
	return partitions
}

func TestPlanMissing(t *testing.T) {
	t.Parallel()
	retired := partition{idRange: days(-5, -4), attached: true, retired: true}
	for name, c := range map[string]struct {
		width      time.Duration
		partitions []partition
		want       []idRange
	}{
		"a new table":    {0, nil, []idRange{days(-1, 0), days(0, 1), days(1, 2), days(2, 3), days(3, 4)}},
		"nothing":        {0, attached(days(-1, 0), days(0, 1), days(1, 2), days(2, 3), days(3, 4)), nil},
		"the last":       {0, attached(days(-1, 0), days(0, 1), days(1, 2), days(2, 3)), []idRange{days(3, 4)}},
		"a hole":         {0, attached(days(-1, 0), days(0, 1), days(2, 3), days(3, 4)), []idRange{days(1, 2)}},
		"in their order": {0, attached(days(3, 4), days(0, 1), days(-1, 0)), []idRange{days(1, 2), days(2, 3)}},
		"a longer retention makes nothing below, since that was dropped": {0, attached(days(1, 2)), []idRange{days(2, 3), days(3, 4)}},
		"retired ones are no window":                                     {0, append(attached(days(1, 2)), retired), []idRange{days(2, 3), days(3, 4)}},
		"only retired ones":                                              {0, []partition{retired}, []idRange{days(-1, 0), days(0, 1), days(1, 2), days(2, 3), days(3, 4)}},
		"nobody has run for long":                                        {0, attached(days(-20, -19)), []idRange{days(-1, 0), days(0, 1), days(1, 2), days(2, 3), days(3, 4)}},
		"a larger width":                                                 {7 * 24 * time.Hour, attached(days(-1, 0), days(0, 1), days(1, 2)), []idRange{days(2, 7)}}, // Mondays
		"a converted table":                                              {0, attached(idRange{"", UUIDv7.Bound(day(3))}), []idRange{days(3, 4)}},
		"the clock is back, or somebody has made the future's first":     {0, attached(days(2, 3)), []idRange{days(3, 4)}},
		"something without an end":                                       {0, attached(idRange{UUIDv7.Bound(day(-9)), ""}), nil},
		"odd bounds": {0, attached(days(-1, 3), idRange{UUIDv7.Bound(day(3).Add(time.Hour)), UUIDv7.Bound(day(3).Add(2 * time.Hour))}),
			[]idRange{{UUIDv7.Bound(day(3)), UUIDv7.Bound(day(3).Add(time.Hour))}, {UUIDv7.Bound(day(3).Add(2 * time.Hour)), UUIDv7.Bound(day(4))}}},
	} {
		p := plan{kind: UUIDv7, width: 24 * time.Hour, ahead: 59 * time.Hour, retention: 48 * time.Hour, partitions: c.partitions}
		if c.width != 0 {
			p.width = c.width
		}
		if got := p.missing(planNow); !slices.Equal(got, c.want) {
			t.Errorf("%s: missing are %v, want %v", name, got, c.want)
		}
	}
	young := plan{kind: ULID, width: 24 * time.Hour, ahead: time.Hour, retention: 1000 * 24 * time.Hour}
	if got := young.missing(time.UnixMilli(0)); len(got) != 1 || got[0] != (idRange{ULID.Bound(time.UnixMilli(0)), ULID.Bound(time.Unix(24*3600, 0))}) {
		t.Errorf("at the epoch %v are missing", got)
	}
}

func TestPlanExpiredAndLeft(t *testing.T) {
	t.Parallel()
	p := plan{kind: UUIDv7, width: 24 * time.Hour, ahead: 24 * time.Hour, retention: 48 * time.Hour}
	part := attached(days(-3, -2))[0]
	for name, c := range map[string]struct {
		now  time.Time
		part partition
		want bool
	}{
		"one millisecond before": {day(0).Add(-time.Millisecond), part, false},
		"at its end":             {day(0), part, true},
		"without an end":         {day(28), partition{idRange: idRange{"", ""}}, false},
		"a converted table":      {day(28), partition{idRange: idRange{"", UUIDv7.Bound(day(3))}}, true},
		"the clock is back":      {time.UnixMilli(0), part, false},
	} {
		if got := p.expired(c.part, c.now); got != c.want {
			t.Errorf("%s: expired is %v", name, got)
		}
	}
	pending := partition{idRange: days(3, 4), attached: true, pending: true}
	for name, c := range map[string]struct {
		partitions []partition
		want       time.Duration
	}{
		"none":            {nil, 0},
		"only the past":   {attached(days(-1, 1)), 0},
		"one and a half":  {attached(days(2, 3), days(1, 2)), 35*time.Hour + 30*time.Minute},
		"up to a hole":    {attached(days(1, 2), days(3, 4)), 11*time.Hour + 30*time.Minute},
		"up to a pending": {append(attached(days(1, 2), days(2, 3)), pending), 35*time.Hour + 30*time.Minute},
		"without an end":  {attached(days(1, 2), idRange{UUIDv7.Bound(day(2)), ""}), math.MaxInt64},
	} {
		p.partitions = c.partitions
		if got := p.left(planNow); got != c.want {
			t.Errorf("%s: left are %s, want %s", name, got, c.want)
		}
	}
}

// Only the bounds decide, and in doubt the message stays with the broker.
func TestExplainClaim(t *testing.T) {
	t.Parallel()
	refused := &pq.Error{Code: stateCheckViolation}
	read := func(texts ...string) func(Query) ([]string, error) {
		return func(Query) ([]string, error) { return append(texts, presentPrefix+UUIDv7.Bound(planNow)), nil }
	}
	at := func(r idRange) string { return r.sql() }
	for name, c := range map[string]struct {
		id    string
		err   error
		query func(Query) ([]string, error)
		want  error
	}{
		"below the window":                    {UUIDv7.Bound(day(1).Add(-time.Millisecond)), refused, read(at(days(2, 3)), at(days(1, 2))), inbox.ErrTooOld},
		"one is dropped meanwhile":            {UUIDv7.Bound(day(0)), refused, read(retiredPrefix, "", at(days(1, 2))), inbox.ErrTooOld},
		"at the epoch":                        {UUIDv7.Bound(time.UnixMilli(0)), refused, read(at(days(1, 2))), inbox.ErrTooOld},
		"above the window":                    {UUIDv7.Bound(day(3)), refused, read(at(days(1, 2)), at(days(2, 3))), ErrNoPartition},
		"in the year 10889":                   {UUIDv7.Bound(lastTime), refused, read(at(days(1, 2))), ErrNoPartition},
		"in a hole":                           {UUIDv7.Bound(day(2)), refused, read(at(days(1, 2)), at(days(3, 4))), ErrNoPartition},
		"in a hole above a retired one":       {UUIDv7.Bound(day(-8)), refused, read(retiredPrefix+at(days(-9, -8)), at(days(1, 2))), inbox.ErrTooOld},
		"only a retired one":                  {UUIDv7.Bound(day(2)), refused, read(retiredPrefix + at(days(1, 2))), ErrNoPartition},
		"below a window of the future":        {UUIDv7.Bound(day(1)), refused, read(at(days(2, 3))), ErrNoPartition},
		"no partition at all":                 {UUIDv7.Bound(day(1)), refused, read(), ErrNoPartition},
		"the catalog cannot be read":          {UUIDv7.Bound(time.UnixMilli(0)), refused, func(Query) ([]string, error) { return nil, context.DeadlineExceeded }, ErrNoPartition},
		"bounds of another kind":              {UUIDv7.Bound(time.UnixMilli(0)), refused, read(idRange{ULID.Bound(day(1)), ULID.Bound(day(2))}.sql()), ErrNoPartition},
		"the partition has come meanwhile":    {UUIDv7.Bound(day(1)), refused, read(at(days(1, 2))), refused},
		"a constraint in a retired partition": {UUIDv7.Bound(day(1)), refused, read(retiredPrefix+at(days(1, 2)), at(days(3, 4))), refused},
		"another error":                       {UUIDv7.Bound(time.UnixMilli(0)), context.Canceled, func(Query) ([]string, error) { panic("asked the catalog") }, context.Canceled},
	} {
		params := KeyParams{Key: inbox.Key{Consumer: "c", MessageID: c.id}}
		err := PartitionedPostgreSQLSchema{IDs: UUIDv7}.ExplainClaim(params, c.err, c.query)
		if !errors.Is(err, c.want) || !errors.Is(err, c.err) {
			t.Errorf("%s: %v", name, err)
		}
		if c.want == refused && err != error(refused) {
			t.Errorf("%s: the error is wrapped: %v", name, err)
		}
		claim := &inbox.Error{Step: "claim", Err: err}
		tooOld := c.want == inbox.ErrTooOld
		if inbox.ShouldPoison(claim) != tooOld || inbox.ShouldRetry(middleware.RetryParams{Err: claim}) == tooOld {
			t.Errorf("%s: poison and retry are wrong", name)
		}
	}
}

func TestPartitionsOptions(t *testing.T) {
	t.Parallel()
	const daily = 24 * time.Hour
	for name, c := range map[string]struct {
		options PartitionsOptions
		want    string // empty: none
	}{
		"the least":              {PartitionsOptions{IDs: ULID, Retention: 30 * daily}, ""},
		"all":                    {PartitionsOptions{IDs: UUIDv7, Retention: time.Hour, Width: time.Minute, Ahead: 2 * time.Hour, Interval: time.Minute, Table: "a.b"}, ""},
		"no kind":                {PartitionsOptions{Retention: daily}, "IDs"},
		"another kind":           {PartitionsOptions{IDs: 3, Retention: daily}, "IDs"},
		"for ever":               {PartitionsOptions{IDs: ULID}, "for ever"},
		"a negative retention":   {PartitionsOptions{IDs: ULID, Retention: -daily}, "Retention must be positive"},
		"the longest retention":  {PartitionsOptions{IDs: ULID, Retention: math.MaxInt64}, "more than 1000 partitions"},
		"as good as for ever":    {PartitionsOptions{IDs: ULID, Retention: daily, Width: 100 * 366 * daily}, "Width"},
		"a fraction of a minute": {PartitionsOptions{IDs: ULID, Retention: daily, Width: 90 * time.Second}, "Width"},
		"a negative width":       {PartitionsOptions{IDs: ULID, Retention: daily, Width: -daily}, "negative"},
		"too seldom":             {PartitionsOptions{IDs: ULID, Retention: daily, Ahead: time.Hour}, "Interval"},
		"a bad table":            {PartitionsOptions{IDs: ULID, Retention: daily, Table: "a b"}, "table"},
	} {
		err := c.options.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewPartitions(nil, PartitionsOptions{IDs: ULID, Retention: daily}); err == nil {
		t.Error("no pool: no error")
	}
}

func TestPartitionNamesFit(t *testing.T) {
	t.Parallel()
	table, err := ParseTable(strings.Repeat("x", maxIdentifierBytes-len(indexSuffix)))
	if err != nil {
		t.Fatal(err)
	}
	if name := table.partition(day(1)).Name(); len(name) > maxIdentifierBytes {
		t.Errorf("%s has %d bytes", name, len(name))
	}
}
