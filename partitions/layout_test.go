package partitions

import (
	"database/sql"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

var layoutNow = time.Date(2026, 12, 1, 12, 30, 0, 0, time.UTC)

func day(n int) time.Time { return time.Date(2026, 12, n, 0, 0, 0, 0, time.UTC) }

func ids(low, high string) dialect.IDRange { return dialect.IDRange{Low: low, High: high} }

func days(from, to int) dialect.IDRange {
	return ids(inbox.UUIDv7.Bound(day(from)), inbox.UUIDv7.Bound(day(to)))
}

func attached(ranges ...dialect.IDRange) []partition {
	partitions := make([]partition, len(ranges))
	for i, r := range ranges {
		partitions[i] = partition{IDRange: r, attached: true}
	}
	return partitions
}

func TestLayoutMissing(t *testing.T) {
	t.Parallel()
	retired := partition{IDRange: days(-5, -4), attached: true, retired: true}
	for name, c := range map[string]struct {
		width      time.Duration
		partitions []partition
		want       []dialect.IDRange
	}{
		"a new table":    {0, nil, []dialect.IDRange{days(-1, 2), days(2, 3), days(3, 4)}},
		"nothing":        {0, attached(days(-1, 0), days(0, 1), days(1, 2), days(2, 3), days(3, 4)), nil},
		"the last":       {0, attached(days(-1, 0), days(0, 1), days(1, 2), days(2, 3)), []dialect.IDRange{days(3, 4)}},
		"a hole":         {0, attached(days(-1, 0), days(0, 1), days(2, 3), days(3, 4)), []dialect.IDRange{days(1, 2)}},
		"in their order": {0, attached(days(3, 4), days(0, 1), days(-1, 0)), []dialect.IDRange{days(1, 2), days(2, 3)}},
		"a longer retention makes nothing below, since that was dropped": {0, attached(days(1, 2)), []dialect.IDRange{days(2, 3), days(3, 4)}},
		"retired ones are no window":                                     {0, append(attached(days(1, 2)), retired), []dialect.IDRange{days(2, 3), days(3, 4)}},
		"only retired ones":                                              {0, []partition{retired}, []dialect.IDRange{days(-1, 2), days(2, 3), days(3, 4)}},
		"nobody has run for long":                                        {0, attached(days(-20, -19)), []dialect.IDRange{days(-1, 2), days(2, 3), days(3, 4)}},
		"a larger width":                                                 {7 * 24 * time.Hour, attached(days(-1, 0), days(0, 1), days(1, 2)), []dialect.IDRange{days(2, 7)}}, // Mondays
		"a converted table":                                              {0, attached(ids("", inbox.UUIDv7.Bound(day(3)))), []dialect.IDRange{days(3, 4)}},
		"the clock is back, or somebody has made the future's first":     {0, attached(days(2, 3)), []dialect.IDRange{days(3, 4)}},
		"something without an end":                                       {0, attached(ids(inbox.UUIDv7.Bound(day(-9)), "")), nil},
		"odd bounds": {0, attached(days(-1, 3), ids(inbox.UUIDv7.Bound(day(3).Add(time.Hour)), inbox.UUIDv7.Bound(day(3).Add(2*time.Hour)))),
			[]dialect.IDRange{ids(inbox.UUIDv7.Bound(day(3)), inbox.UUIDv7.Bound(day(3).Add(time.Hour))), ids(inbox.UUIDv7.Bound(day(3).Add(2*time.Hour)), inbox.UUIDv7.Bound(day(4)))}},
	} {
		p := layout{kind: inbox.UUIDv7, width: 24 * time.Hour, ahead: 59 * time.Hour, retention: 48 * time.Hour, partitions: c.partitions}
		if c.width != 0 {
			p.width = c.width
		}
		if got := p.missing(layoutNow); !slices.Equal(got, c.want) {
			t.Errorf("%s: missing are %v, want %v", name, got, c.want)
		}
	}
	young := layout{kind: inbox.ULID, width: 24 * time.Hour, ahead: time.Hour, retention: 1000 * 24 * time.Hour}
	if got := young.missing(time.UnixMilli(0)); len(got) != 1 || got[0] != (ids(inbox.ULID.Bound(time.UnixMilli(0)), inbox.ULID.Bound(time.Unix(24*3600, 0)))) {
		t.Errorf("at the epoch %v are missing", got)
	}
}

func TestLayoutExpiredAndLeft(t *testing.T) {
	t.Parallel()
	p := layout{kind: inbox.UUIDv7, width: 24 * time.Hour, ahead: 24 * time.Hour, retention: 48 * time.Hour}
	part := attached(days(-3, -2))[0]
	for name, c := range map[string]struct {
		now  time.Time
		part partition
		want bool
	}{
		"one millisecond before": {day(0).Add(-time.Millisecond), part, false},
		"at its end":             {day(0), part, true},
		"without an end":         {day(28), partition{IDRange: ids("", "")}, false},
		"a converted table":      {day(28), partition{IDRange: ids("", inbox.UUIDv7.Bound(day(3)))}, true},
		"the clock is back":      {time.UnixMilli(0), part, false},
	} {
		if got := p.expired(c.part, c.now); got != c.want {
			t.Errorf("%s: expired is %v", name, got)
		}
	}
	pending := partition{IDRange: days(3, 4), attached: true, pending: true}
	for name, c := range map[string]struct {
		partitions []partition
		want       time.Duration
	}{
		"none":            {nil, 0},
		"only the past":   {attached(days(-1, 1)), 0},
		"one and a half":  {attached(days(2, 3), days(1, 2)), 35*time.Hour + 30*time.Minute},
		"up to a hole":    {attached(days(1, 2), days(3, 4)), 11*time.Hour + 30*time.Minute},
		"up to a pending": {append(attached(days(1, 2), days(2, 3)), pending), 35*time.Hour + 30*time.Minute},
		"without an end":  {attached(days(1, 2), ids(inbox.UUIDv7.Bound(day(2)), "")), math.MaxInt64},
	} {
		p.partitions = c.partitions
		if got := p.left(layoutNow); got != c.want {
			t.Errorf("%s: left are %s, want %s", name, got, c.want)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	const daily = 24 * time.Hour
	for name, c := range map[string]struct {
		options Options
		want    string // empty: none
	}{
		"the least":              {Options{IDs: inbox.ULID, Retention: 30 * daily}, ""},
		"all":                    {Options{IDs: inbox.UUIDv7, Retention: time.Hour, Width: time.Minute, Ahead: 2 * time.Hour, Interval: time.Minute, Table: "a.b"}, ""},
		"no kind":                {Options{Retention: daily}, "IDs"},
		"another kind":           {Options{IDs: 3, Retention: daily}, "IDs"},
		"for ever":               {Options{IDs: inbox.ULID}, "for ever"},
		"a negative retention":   {Options{IDs: inbox.ULID, Retention: -daily}, "Retention must be positive"},
		"the longest retention":  {Options{IDs: inbox.ULID, Retention: math.MaxInt64}, "more than 1000 partitions"},
		"as good as for ever":    {Options{IDs: inbox.ULID, Retention: daily, Width: 100 * 366 * daily}, "Width"},
		"a fraction of a minute": {Options{IDs: inbox.ULID, Retention: daily, Width: 90 * time.Second}, "Width"},
		"a negative width":       {Options{IDs: inbox.ULID, Retention: daily, Width: -daily}, "negative"},
		"too seldom":             {Options{IDs: inbox.ULID, Retention: daily, Ahead: time.Hour}, "Interval"},
		"a bad table":            {Options{IDs: inbox.ULID, Retention: daily, Table: "a b"}, "table"},
	} {
		err := c.options.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(nil, Options{IDs: inbox.ULID, Retention: daily}); err == nil {
		t.Error("no pool: no error")
	}
}

func TestPartitionNamesFit(t *testing.T) {
	t.Parallel()
	const maxIdentifierBytes = 63
	longest := strings.Repeat("x", maxIdentifierBytes-len("_consumer_processed_at_idx"))
	db, err := sql.Open("postgres", "") // never opened
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	p, err := New(db, Options{IDs: inbox.UUIDv7, Retention: time.Hour, Table: longest})
	if err != nil {
		t.Fatal(err)
	}
	if name := p.partitionName(days(1, 2)).Name(); len(name) > maxIdentifierBytes {
		t.Errorf("%s has %d bytes", name, len(name))
	}
}
