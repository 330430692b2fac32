package dialect

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	inbox "github.com/devmappa/watermill-inbox"
)

// IDRange is a range of message ids, from the lower one on and below the upper one. Empty: without that limit.
type IDRange struct{ Low, High string }

// Covers reports whether the id is in the range.
func (r IDRange) Covers(id string) bool { return r.Low <= id && (r.High == "" || id < r.High) }

// boundExpression is how PostgreSQL writes a partition's bounds.
var boundExpression = regexp.MustCompile(`^FOR VALUES FROM \((?:MINVALUE|'([^']*)')\) TO \((?:MAXVALUE|'([^']*)')\)$`)

// ParseIDRange reads what PostgreSQL writes of a partition's bounds, and what [IDRange.Bounds] does.
func ParseIDRange(kind inbox.IDKind, text string) (IDRange, error) {
	match := boundExpression.FindStringSubmatch(text)
	if match == nil {
		return IDRange{}, fmt.Errorf("the bounds of a partition are not understood: %s", text)
	}
	for _, bound := range match[1:] {
		if _, ok := kind.Time(bound); bound != "" && !ok {
			return IDRange{}, fmt.Errorf("a partition has the bound %q, which is not a %s", bound, kind)
		}
	}
	return IDRange{match[1], match[2]}, nil
}

// Bounds is the range as ATTACH PARTITION wants it.
func (r IDRange) Bounds() string {
	low, high := "MINVALUE", "MAXVALUE"
	if r.Low != "" {
		low = Literal(r.Low)
	}
	if r.High != "" {
		high = Literal(r.High)
	}
	return "FOR VALUES FROM (" + low + ") TO (" + high + ")"
}

// window is what the attached partitions take, but for those whose detachment is pending.
type window struct {
	open    []IDRange // of partitions that are not retired, in their order
	retired []IDRange // kept because of unsent messages
	present string    // the bound of the database's time
}

// windowQuery selects a text per partition, and one for the present, for parseWindow.
func (p Partitioned) windowQuery(parent Table) Query {
	return Query{Text: `SELECT ` + Literal(presentPrefix) + ` || ` + present(p.IDs) + ` UNION ALL ` +
		`SELECT CASE WHEN starts_with(d.description, ` + Literal(RetiredComment) + `) THEN ` + Literal(retiredPrefix) +
		` ELSE '' END || coalesce(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '') ` +
		`FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid ` +
		`LEFT JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0 ` +
		`WHERE i.inhparent = ` + RegClass(parent) + ` AND NOT i.inhdetachpending`}
}

const (
	presentPrefix = "present "
	retiredPrefix = "retired "
)

func (p Partitioned) parseWindow(texts []string) (window, error) {
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
		r, err := ParseIDRange(p.IDs, bounds)
		switch {
		case err != nil:
			return window{}, err
		case retired:
			w.retired = append(w.retired, r)
		default:
			w.open = append(w.open, r)
		}
	}
	slices.SortFunc(w.open, func(a, b IDRange) int { return strings.Compare(a.Low, b.Low) })
	return w, nil
}

func (w window) covers(id string) bool {
	covers := func(r IDRange) bool { return r.Covers(id) }
	return slices.ContainsFunc(w.open, covers) || slices.ContainsFunc(w.retired, covers)
}

// isBelow reports whether the window has moved on beyond the id. One that begins in the future has not.
func (w window) isBelow(id string) bool {
	return len(w.open) > 0 && id < w.open[0].Low && w.open[0].Low <= w.present
}

// text is the window for an error's text.
func (w window) text(kind inbox.IDKind) string {
	if len(w.open) == 0 {
		return "nothing"
	}
	at := func(bound, without string) string {
		if at, ok := kind.Time(bound); ok {
			return UTC(at)
		}
		return without
	}
	return at(w.open[0].Low, "the beginning") + " to " + at(w.open[len(w.open)-1].High, "the end")
}
