package inboxsql

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
)

// idRange is a range of message ids, from the lower one on and below the upper one. Empty: without that limit.
type idRange struct{ low, high string }

func (r idRange) covers(id string) bool { return r.low <= id && (r.high == "" || id < r.high) }

// boundExpression is how PostgreSQL writes a partition's bounds.
var boundExpression = regexp.MustCompile(`^FOR VALUES FROM \((?:MINVALUE|'([^']*)')\) TO \((?:MAXVALUE|'([^']*)')\)$`)

func (k IDKind) parseRange(text string) (idRange, error) {
	match := boundExpression.FindStringSubmatch(text)
	if match == nil {
		return idRange{}, fmt.Errorf("the bounds of a partition are not understood: %s", text)
	}
	for _, bound := range match[1:] {
		if _, ok := k.Time(bound); bound != "" && !ok {
			return idRange{}, fmt.Errorf("a partition has the bound %q, which is not a %s", bound, k)
		}
	}
	return idRange{match[1], match[2]}, nil
}

// sql is the range as ATTACH PARTITION wants it, and as parseRange reads it.
func (r idRange) sql() string {
	low, high := "MINVALUE", "MAXVALUE"
	if r.low != "" {
		low = pq.QuoteLiteral(r.low)
	}
	if r.high != "" {
		high = pq.QuoteLiteral(r.high)
	}
	return "FOR VALUES FROM (" + low + ") TO (" + high + ")"
}

// partition is a partition of the inbox table, or was one.
//
// One that ended before the retention is marked as retired, by a comment, before anything else happens to it,
// and stays so. The mark says that its window is over although it may still be attached, because it holds
// unsent messages; and that a table which is no longer attached is ours to drop. It names the table, so that
// a table that somebody renames, to keep it, is not dropped.
type partition struct {
	idRange
	name     Table
	attached bool // also while its detachment is pending
	pending  bool
	retired  bool
	comment  string
}

// compare sorts: first the one whose detachment is pending, because nothing else can be detached before that is
// finished, then those that are detached, then the attached ones in their order.
func (p partition) compare(other partition) int {
	rank := func(p partition) int {
		switch {
		case p.pending:
			return 0
		case !p.attached:
			return 1
		}
		return 2
	}
	return cmp.Or(cmp.Compare(rank(p), rank(other)), strings.Compare(p.low, other.low))
}

// listQuery selects the partitions: schema, name, bounds, whether attached, whether its detachment is pending,
// comment. Detached tables are among them if they are marked.
func listQuery(parent Table) string {
	return `SELECT n.nspname, c.relname, coalesce(pg_catalog.pg_get_expr(c.relpartbound, c.oid), ''), i.inhrelid IS NOT NULL, ` +
		`coalesce(i.inhdetachpending, false), coalesce(d.description, '') ` +
		`FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ` +
		`LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid ` +
		`LEFT JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0 ` +
		`WHERE i.inhparent = ` + regclass(parent) + ` ` +
		`OR i.inhrelid IS NULL AND c.relkind = 'r' AND starts_with(d.description, ` + pq.QuoteLiteral(markStart) + `)`
}

const markStart = "watermill-inbox: retired partition "

// mark is the comment on a retired partition.
func (p partition) mark(parent Table) string { return p.markStart(parent) + p.sql() }

func (p partition) markStart(parent Table) string {
	return markStart + p.name.Quoted() + " of " + parent.Quoted() + " "
}

// readMark returns the bounds in the comment on a table that is no longer attached.
func (p partition) readMark(parent Table, kind IDKind) (bounds idRange, ours bool) {
	text, ours := strings.CutPrefix(p.comment, p.markStart(parent))
	if !ours {
		return idRange{}, false
	}
	bounds, err := kind.parseRange(text)
	return bounds, err == nil
}

// window is what the attached partitions take, but for those whose detachment is pending.
type window struct {
	open    []idRange // of partitions that are not retired, in their order
	retired []idRange // kept because of unsent messages
	present string    // the bound of the database's time
}

// windowQuery selects a text per partition, and one for the present, for parseWindow.
func (s PartitionedPostgreSQLSchema) windowQuery(parent Table) Query {
	return Query{Query: `SELECT ` + pq.QuoteLiteral(presentPrefix) + ` || ` + s.IDs.present() + ` UNION ALL ` +
		`SELECT CASE WHEN starts_with(d.description, ` + pq.QuoteLiteral(markStart) + `) THEN ` + pq.QuoteLiteral(retiredPrefix) +
		` ELSE '' END || coalesce(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '') ` +
		`FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid ` +
		`LEFT JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0 ` +
		`WHERE i.inhparent = ` + regclass(parent) + ` AND NOT i.inhdetachpending`}
}

const (
	presentPrefix = "present "
	retiredPrefix = "retired "
)

func (s PartitionedPostgreSQLSchema) parseWindow(texts []string) (window, error) {
	var w window
	for _, text := range texts {
		if present, ok := strings.CutPrefix(text, presentPrefix); ok {
			w.present = present
			continue
		}
		bounds, retired := strings.CutPrefix(text, retiredPrefix)
		if bounds == "" {
			continue // dropped while it was being listed
		}
		r, err := s.IDs.parseRange(bounds)
		switch {
		case err != nil:
			return window{}, err
		case retired:
			w.retired = append(w.retired, r)
		default:
			w.open = append(w.open, r)
		}
	}
	slices.SortFunc(w.open, func(a, b idRange) int { return strings.Compare(a.low, b.low) })
	return w, nil
}

func (w window) covers(id string) bool {
	covers := func(r idRange) bool { return r.covers(id) }
	return slices.ContainsFunc(w.open, covers) || slices.ContainsFunc(w.retired, covers)
}

// isBelow reports whether the window has moved on beyond the id. One that begins in the future has not.
func (w window) isBelow(id string) bool {
	return len(w.open) > 0 && id < w.open[0].low && w.open[0].low <= w.present
}

// text is the window for an error's text.
func (w window) text(kind IDKind) string {
	if len(w.open) == 0 {
		return "nothing"
	}
	at := func(bound, without string) string {
		if at, ok := kind.Time(bound); ok {
			return utc(at)
		}
		return without
	}
	return at(w.open[0].low, "the beginning") + " to " + at(w.open[len(w.open)-1].high, "the end")
}

// plan says what a table with these partitions needs at a time.
type plan struct {
	kind       IDKind
	width      time.Duration
	ahead      time.Duration
	retention  time.Duration
	partitions []partition
}

// missing returns the ranges for which partitions are to be made, in their order. Never below where the window
// begins, not even when the clock says that this is in the future: what was there may have been dropped, and its
// messages would be new. Ranges follow the width, counted from midnight UTC, and leave out what any partition has.
func (p plan) missing(now time.Time) []idRange {
	from := now.Add(-p.retention).Truncate(p.width)
	lowest, found := "", false
	for _, part := range p.partitions {
		if !part.retired && (!found || part.low < lowest) {
			lowest, found = part.low, true
		}
	}
	var missing []idRange
	for at := from; at.Before(now.Add(p.ahead)); at = at.Add(p.width) {
		gap := idRange{max(p.kind.Bound(at), lowest), p.kind.Bound(at.Add(p.width))}
		missing = append(missing, p.without(gap)...)
	}
	return missing
}

// without returns what is left of the range beside the partitions, in its order.
func (p plan) without(r idRange) []idRange {
	left := []idRange{r}
	if r.low >= r.high {
		left = nil // before 1970, or below the lowest
	}
	for _, part := range p.partitions {
		var rest []idRange
		for _, piece := range left {
			rest = append(rest, idRange{piece.low, min(piece.high, part.low)})
			if part.high != "" {
				rest = append(rest, idRange{max(piece.low, part.high), piece.high})
			}
		}
		left = slices.DeleteFunc(rest, func(r idRange) bool { return r.low >= r.high })
	}
	return left
}

// expired reports whether all ids of the partition are older than the retention.
func (p plan) expired(part partition, now time.Time) bool {
	return part.high != "" && part.high <= p.kind.Bound(now.Add(-p.retention))
}

// isAttached and isDetached report what the partition is by now.
func (p plan) isAttached(part partition) bool {
	return slices.ContainsFunc(p.partitions, func(now partition) bool { return now.name == part.name && now.attached })
}

func (p plan) isDetached(part partition) bool {
	return slices.ContainsFunc(p.partitions, func(now partition) bool { return now.name == part.name && !now.attached })
}

// left is how far ahead of the time the partitions reach without a gap.
func (p plan) left(now time.Time) time.Duration {
	end := p.kind.Bound(now)
	for moved := true; moved; {
		moved = false
		for _, part := range p.partitions {
			if part.attached && !part.pending && part.covers(end) {
				if part.high == "" {
					return lastTime.Sub(now) // of Duration, at most
				}
				end, moved = part.high, true
			}
		}
	}
	if end == p.kind.Bound(now) {
		return 0
	}
	at, _ := p.kind.Time(end)
	return at.Sub(now)
}
