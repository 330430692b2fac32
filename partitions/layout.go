package partitions

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// partition is a partition of the inbox table, or was one.
//
// One that ended before the retention is labelled as retired, by a comment, before anything else happens to it,
// and stays so. The label says that its window is over although it may still be attached, and that a table which is no
// longer attached is ours to drop. It names the table, so that
// a table that somebody renames, to keep it, is not dropped.
type partition struct {
	dialect.IDRange
	name     dialect.Table
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
	return cmp.Or(cmp.Compare(rank(p), rank(other)), strings.Compare(p.Low, other.Low))
}

// label is the comment on a retired partition.
func (p partition) label(parent dialect.Table) string { return p.labelStart(parent) + p.Bounds() }

func (p partition) labelStart(parent dialect.Table) string {
	return dialect.RetiredComment + p.name.String() + " of " + parent.String() + " "
}

// readLabel returns the bounds in the comment on a table that is no longer attached.
func (p partition) readLabel(parent dialect.Table, kind inbox.IDKind) (bounds dialect.IDRange, ours bool) {
	text, ours := strings.CutPrefix(p.comment, p.labelStart(parent))
	if !ours {
		return dialect.IDRange{}, false
	}
	bounds, err := dialect.ParseIDRange(kind, text)
	return bounds, err == nil
}

// layout is a table's partitions, and what it needs at a time.
type layout struct {
	kind       inbox.IDKind
	width      time.Duration
	ahead      time.Duration
	retention  time.Duration
	partitions []partition
}

// readLayout lists the partitions, and returns the database's time.
func (p *Partitions) readLayout(ctx context.Context, on engine.Executor) (layout, time.Time, error) {
	o := p.options
	l := layout{kind: o.IDs, width: o.Width, ahead: o.Ahead, retention: o.Retention}
	now, err := p.now(ctx, on)
	if err != nil {
		return l, now, err
	}
	var (
		schema, name, bounds string
		part                 partition
	)
	err = on.Query(ctx, p.dialect.List(p.table()), []any{&schema, &name, &bounds, &part.attached, &part.pending, &part.comment}, func() (err error) {
		part.name = p.table().In(schema).Named(name)
		switch {
		case part.attached && bounds == "":
			return nil // dropped while it was being listed
		case part.attached:
			part.retired = strings.HasPrefix(part.comment, dialect.RetiredComment)
			part.IDRange, err = dialect.ParseIDRange(o.IDs, bounds)
		default:
			if part.IDRange, part.retired = part.readLabel(p.table(), o.IDs); !part.retired {
				return nil // another table's, or renamed
			}
		}
		l.partitions = append(l.partitions, part)
		return err
	})
	if err != nil {
		return l, now, fmt.Errorf("partitions: cannot list the partitions: %w", err)
	}
	slices.SortFunc(l.partitions, partition.compare)
	return l, now, nil
}

// now is the database's time.
func (p *Partitions) now(ctx context.Context, on engine.Executor) (time.Time, error) {
	var milliseconds int64
	if err := on.Query(ctx, p.dialect.Clock(), []any{&milliseconds}, func() error { return nil }); err != nil {
		return time.Time{}, fmt.Errorf("partitions: cannot read the time: %w", err)
	}
	return time.UnixMilli(milliseconds).UTC(), nil
}

// missing returns the ranges for which partitions are to be made, in their order. Never below where the window
// begins, not even when the clock says that this is in the future: what was there may have been dropped, and its
// messages would be new. Ranges follow the width, counted from midnight UTC, and leave out what any partition has. The
// first one reaches from the retention's beginning to the end of the present's width: were the past made in as many ranges
// as it has widths, claims would wait for all of them, and were the present made before it, ids of the past would be too old.
func (l layout) missing(now time.Time) []dialect.IDRange {
	from := now.Add(-l.retention).Truncate(l.width)
	lowest, found := "", false
	for _, part := range l.partitions {
		if !part.retired && (!found || part.Low < lowest) {
			lowest, found = part.Low, true
		}
	}
	var missing []dialect.IDRange
	for at, end := from, now.Truncate(l.width).Add(l.width); at.Before(now.Add(l.ahead)); at, end = end, end.Add(l.width) {
		gap := dialect.IDRange{Low: max(l.kind.Bound(at), lowest), High: l.kind.Bound(end)}
		missing = append(missing, l.without(gap)...)
	}
	return missing
}

// without returns what is left of the range beside the partitions, in its order.
func (l layout) without(r dialect.IDRange) []dialect.IDRange {
	left := []dialect.IDRange{r}
	if r.Low >= r.High {
		left = nil // before 1970, or below the lowest
	}
	for _, part := range l.partitions {
		var rest []dialect.IDRange
		for _, piece := range left {
			rest = append(rest, dialect.IDRange{Low: piece.Low, High: min(piece.High, part.Low)})
			if part.High != "" {
				rest = append(rest, dialect.IDRange{Low: max(piece.Low, part.High), High: piece.High})
			}
		}
		left = slices.DeleteFunc(rest, func(r dialect.IDRange) bool { return r.Low >= r.High })
	}
	return left
}

// expired reports whether all ids of the partition are older than the retention.
func (l layout) expired(part partition, now time.Time) bool {
	return part.High != "" && part.High <= l.kind.Bound(now.Add(-l.retention))
}

// isAttached and isDetached report what the partition is by now.
func (l layout) isAttached(part partition) bool {
	return slices.ContainsFunc(l.partitions, func(now partition) bool { return now.name == part.name && now.attached })
}

func (l layout) isDetached(part partition) bool {
	return slices.ContainsFunc(l.partitions, func(now partition) bool { return now.name == part.name && !now.attached })
}

// left is how far ahead of the time the partitions reach without a gap.
func (l layout) left(now time.Time) time.Duration {
	end := l.kind.Bound(now)
	for moved := true; moved; {
		moved = false
		for _, part := range l.partitions {
			if part.attached && !part.pending && part.Covers(end) {
				if part.High == "" {
					return math.MaxInt64
				}
				end, moved = part.High, true
			}
		}
	}
	if end == l.kind.Bound(now) {
		return 0
	}
	at, _ := l.kind.Time(end)
	return at.Sub(now)
}
