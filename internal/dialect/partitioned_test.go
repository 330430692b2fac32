package dialect

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
)

// sqlError is a driver's error with an SQLSTATE.
type sqlError string

func (e sqlError) Error() string    { return "refused" }
func (e sqlError) SQLState() string { return string(e) }

var explainNow = time.Date(2026, 12, 1, 12, 30, 0, 0, time.UTC)

func day(n int) time.Time { return time.Date(2026, 12, n, 0, 0, 0, 0, time.UTC) }

func days(from, to int) IDRange {
	return IDRange{inbox.UUIDv7.Bound(day(from)), inbox.UUIDv7.Bound(day(to))}
}

// Only the bounds decide, and in doubt the message stays with the broker.
func TestExplainClaim(t *testing.T) {
	t.Parallel()
	refused := sqlError(StateCheckViolation)
	read := func(texts ...string) func(Query) ([]string, error) {
		return func(Query) ([]string, error) { return append(texts, presentPrefix+inbox.UUIDv7.Bound(explainNow)), nil }
	}
	at := func(r IDRange) string { return r.Bounds() }
	for name, c := range map[string]struct {
		id    string
		err   error
		query func(Query) ([]string, error)
		want  error
	}{
		"below the window":                    {inbox.UUIDv7.Bound(day(1).Add(-time.Millisecond)), refused, read(at(days(2, 3)), at(days(1, 2))), inbox.ErrTooOld},
		"one is dropped meanwhile":            {inbox.UUIDv7.Bound(day(0)), refused, read(retiredPrefix, "", at(days(1, 2))), inbox.ErrTooOld},
		"at the epoch":                        {inbox.UUIDv7.Bound(time.UnixMilli(0)), refused, read(at(days(1, 2))), inbox.ErrTooOld},
		"above the window":                    {inbox.UUIDv7.Bound(day(3)), refused, read(at(days(1, 2)), at(days(2, 3))), ErrNoPartition},
		"in the year 10889":                   {inbox.UUIDv7.Bound(time.UnixMilli(1<<48 - 1)), refused, read(at(days(1, 2))), ErrNoPartition},
		"in a hole":                           {inbox.UUIDv7.Bound(day(2)), refused, read(at(days(1, 2)), at(days(3, 4))), ErrNoPartition},
		"in a hole above a retired one":       {inbox.UUIDv7.Bound(day(-8)), refused, read(retiredPrefix+at(days(-9, -8)), at(days(1, 2))), inbox.ErrTooOld},
		"only a retired one":                  {inbox.UUIDv7.Bound(day(2)), refused, read(retiredPrefix + at(days(1, 2))), ErrNoPartition},
		"below a window of the future":        {inbox.UUIDv7.Bound(day(1)), refused, read(at(days(2, 3))), ErrNoPartition},
		"no partition at all":                 {inbox.UUIDv7.Bound(day(1)), refused, read(), ErrNoPartition},
		"the catalog cannot be read":          {inbox.UUIDv7.Bound(time.UnixMilli(0)), refused, func(Query) ([]string, error) { return nil, context.DeadlineExceeded }, ErrNoPartition},
		"bounds of another kind":              {inbox.UUIDv7.Bound(time.UnixMilli(0)), refused, read(IDRange{inbox.ULID.Bound(day(1)), inbox.ULID.Bound(day(2))}.Bounds()), ErrNoPartition},
		"the partition has come meanwhile":    {inbox.UUIDv7.Bound(day(1)), refused, read(at(days(1, 2))), refused},
		"a constraint in a retired partition": {inbox.UUIDv7.Bound(day(1)), refused, read(retiredPrefix+at(days(1, 2)), at(days(3, 4))), refused},
		"another error":                       {inbox.UUIDv7.Bound(time.UnixMilli(0)), context.Canceled, func(Query) ([]string, error) { panic("asked the catalog") }, context.Canceled},
	} {
		key := inbox.Key{Consumer: "c", MessageID: c.id}
		err := Partitioned{IDs: inbox.UUIDv7}.ExplainClaim(Table{name: "t"}, key, c.err, c.query)
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
