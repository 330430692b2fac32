package partitions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
	"github.com/devmappa/watermill-inbox/internal/interval"
)

// Convert makes a partitioned table of a plain one, while services claim in it: the table becomes the first
// partition under its name with _old at the end, from the beginning to a bound in the future, and is retired as a
// whole when that is older than the retention. Until then no id is too old for it. No record is copied. A table that is partitioned already is left as it is, but for missing
// partitions.
//
// It first adds a CHECK that all ids are of the kind and below the bound, and validates it, while claims go on. Twice, to
// add that and to change places, it needs the table for itself: while it waits for open transactions, of handlers and
// of readers, new claims wait too, for a tenth of a second at first and never for more than five seconds in a row. If handlers are open all
// the time and take longer, it goes on trying until the context ends. Meanwhile claims with other ids fail, and their
// messages stay with the broker.
//
// It refuses a table that has records with other ids, with their number, and one with triggers, rules, views,
// foreign keys, policies or publications, which would not move along. Grants and the owner do. An error leaves the
// plain table as it was. If it is interrupted, by the context's end or a crash, call it again: the CHECK stays,
// and would refuse ids from its bound on, which is Ahead from when it was added.
//
// Services claim with inboxsql.DefaultPostgreSQLSchema until it has returned, and also after that: then let them follow
// with inboxsql.PartitionedPostgreSQLSchema, which refuses other ids.
func (p *Partitions) Convert(ctx context.Context) error {
	for done := false; !done; {
		var err error
		if done, err = p.convertStep(ctx); err != nil {
			return fmt.Errorf("partitions: cannot convert table %s: %w", p.table().String(), errors.Join(err, p.abandon(ctx)))
		}
	}
	return p.create(ctx, &Pass{})
}

// conversion is how far a table has come.
type conversion struct {
	relkind   string // r: plain, p: partitioned; empty: no table
	bound     string // of the CHECK; empty: there is none yet
	validated bool
}

// convertStep looks how far the table has come and takes one step on.
func (p *Partitions) convertStep(ctx context.Context) (done bool, err error) {
	if err := p.locate(ctx); err != nil {
		return false, err
	}
	c, err := p.conversion(ctx, p.pool)
	if err != nil {
		return false, err
	}
	now, err := p.now(ctx, p.pool)
	if err != nil {
		return false, err
	}
	switch at, _ := p.options.IDs.Time(c.bound); {
	case c.relkind == "":
		return false, errors.New("there is no such table")
	case c.relkind == "p":
		return true, p.prepare(ctx)
	case c.bound == "":
		return false, p.addCheck(ctx, now)
	case at.Before(now.Add(p.options.Ahead / 8)):
		return false, p.dropCheck(ctx, c) // left by somebody long ago
	case !c.validated:
		return false, p.validateCheck(ctx, c)
	}
	return false, p.exchange(ctx, c)
}

func (p *Partitions) conversion(ctx context.Context, on engine.Executor) (c conversion, err error) {
	err = on.Query(ctx, p.dialect.Conversion(p.table()), []any{&c.relkind, &c.bound, &c.validated}, func() error { return nil })
	return c, err
}

// addCheck adds the CHECK, for new records only.
func (p *Partitions) addCheck(ctx context.Context, now time.Time) error {
	c := conversion{bound: p.options.IDs.Bound(now.Add(p.options.Ahead + p.options.Width).Truncate(p.options.Width))}
	if err := p.convertible(ctx, c); err != nil {
		return err
	}
	p.options.Logger.Info("Converting the inbox table", watermill.LogFields{"table": p.table().String(), "bound": c.bound})
	return p.exclusively(ctx, func(tx engine.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now.relkind != "r" || now.bound != "" {
			return err // another instance was here
		}
		return execAll(ctx, tx, p.dialect.AddCheck(p.table(), c.bound))
	})
}

// convertible returns an error when the table cannot be converted.
func (p *Partitions) convertible(ctx context.Context, c conversion) error {
	if err := p.engine.CheckBy(ctx, p.dialect.CheckConvertible(p.table())); err != nil {
		return err
	}
	var count int
	err := p.pool.Query(ctx, p.dialect.CountInconvertible(p.table(), c.bound), []any{&count}, func() error { return nil })
	if err == nil && count > 0 {
		at, _ := p.options.IDs.Time(c.bound)
		err = fmt.Errorf("%d records have ids that are not %ss in their canonical spelling, or are later than %s: delete them or wait until a Cleaner has",
			count, p.options.IDs, dialect.UTC(at))
	}
	return err
}

// validateCheck reads the table, while claims go on.
func (p *Partitions) validateCheck(ctx context.Context, c conversion) error {
	err := execAll(ctx, p.pool, p.dialect.ValidateCheck(p.table(), c.bound))
	switch dialect.SQLState(err) {
	case dialect.StateCheckViolation:
		return errors.Join(p.convertible(ctx, c), err)
	case "42704", "42809": // no such constraint, not a table: another instance was faster
		return nil
	}
	return err
}

// exchange puts the partitioned table in the plain one's place. The CHECK spares ATTACH the reading, and is not
// needed any more then: the partition's bound says the same.
func (p *Partitions) exchange(ctx context.Context, c conversion) error {
	table, old := p.table(), p.table().Named(p.table().Name()+"_old")
	return p.exclusively(ctx, func(tx engine.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now != c {
			return err // another instance was here
		}
		// The partitioned table's indexes get the names of the plain one's.
		if err := p.execTexts(ctx, tx, p.dialect.RenameIndexes(table)); err != nil {
			return err
		}
		if err := execAll(ctx, tx, append(p.dialect.Replace(table, old), p.dialect.DropCheck(table, c.bound))...); err != nil {
			return err
		}
		if err := p.execTexts(ctx, tx, p.dialect.GiveGrants(old, table)); err != nil {
			return err
		}
		if err := p.execTexts(ctx, tx, p.dialect.GiveOwner(old, table)); err != nil {
			return err
		}
		return execAll(ctx, tx, p.attach(partition{name: old, IDRange: dialect.IDRange{High: c.bound}}), p.dialect.DropCheck(old, c.bound))
	})
}

// abandon leaves the plain table as it was, after an error. When the context has ended there is no time for it.
func (p *Partitions) abandon(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	c, err := p.conversion(ctx, p.pool)
	if err != nil || c.relkind != "r" || c.bound == "" {
		return err
	}
	return p.dropCheck(ctx, c)
}

func (p *Partitions) dropCheck(ctx context.Context, c conversion) error {
	return p.exclusively(ctx, func(tx engine.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now.relkind != "r" || now.bound != c.bound {
			return err // another instance was here
		}
		return execAll(ctx, tx, p.dialect.DropCheck(p.table(), c.bound))
	})
}

// The wait of a try to get the table for itself.
const (
	firstExclusivePatience = 100 * time.Millisecond
	lastExclusivePatience  = 5 * time.Second
)

// exclusively runs a short transaction that has the table for itself. Claims wait while it waits for open
// handlers, so it tries for a short time, leaves them a multiple of that, and tries again for longer.
func (p *Partitions) exclusively(ctx context.Context, do func(engine.Tx) error) error {
	for patience := firstExclusivePatience; ; patience = min(2*patience, lastExclusivePatience) {
		err := p.locked(ctx, "ACCESS EXCLUSIVE", patience, do)
		if !dialect.HasAnyPrefix(dialect.SQLState(err), "55P03", "40P01") {
			return err
		}
		p.options.Logger.Debug("The inbox table is in use, trying again", watermill.LogFields{"table": p.table().String(), "waited": patience})
		if err := interval.Wait(ctx, 5*patience); err != nil {
			return err
		}
	}
}
