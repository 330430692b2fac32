package partitions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// create makes the partitions that are missing, each in a transaction of its own. CREATE TABLE ... PARTITION OF
// would lock the whole table, and every claim would wait behind it for the longest open handler; to attach a table
// that nobody knows yet does not.
func (p *Partitions) create(ctx context.Context, pass *Pass) error {
	list, now, err := p.readLayout(ctx, p.pool)
	if err != nil {
		return err
	}
	var errs []error
	for _, bounds := range list.missing(now) {
		part := partition{IDRange: bounds, name: p.partitionName(bounds)}
		created := false
		err := p.alter(ctx, func(tx engine.Tx) error {
			list, _, err := p.readLayout(ctx, tx)
			if err != nil {
				return err
			}
			if !slices.Equal(list.without(bounds), []dialect.IDRange{bounds}) {
				return nil // another instance has made it
			}
			created = true
			if err := execAll(ctx, tx, p.dialect.CreatePartition(p.table(), part.name)); err != nil {
				return err
			}
			if err := p.execTexts(ctx, tx, p.dialect.GiveOwner(p.table(), part.name)); err != nil {
				return err
			}
			return execAll(ctx, tx, p.attach(part))
		})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			errs = append(errs, fmt.Errorf("partitions: cannot make partition %s: %w", part.name.Name(), err))
		case created:
			pass.Created = append(pass.Created, part.name.Name())
		}
	}
	return errors.Join(errs...)
}

// partitionName is the name of the partition that begins with the range. The longest name of a table leaves just
// enough room.
func (p *Partitions) partitionName(bounds dialect.IDRange) dialect.Table {
	at, _ := p.options.IDs.Time(bounds.Low)
	return p.table().Named(p.table().Name() + "_p" + at.UTC().Format("20060102t150405"))
}

func (p *Partitions) attach(part partition) dialect.Query {
	return p.dialect.Attach(p.table(), part.name, part.IDRange)
}

// alterPatience bounds the wait for other instances and for maintenance like VACUUM. No claim waits meanwhile.
const alterPatience = 10 * time.Second

// alter runs a short transaction that has the table's partitions for itself among all instances: by the lock
// that attaching takes anyway, which no claim waits for.
func (p *Partitions) alter(ctx context.Context, do func(engine.Tx) error) error {
	return p.locked(ctx, "SHARE UPDATE EXCLUSIVE", alterPatience, do)
}

func (p *Partitions) locked(ctx context.Context, mode string, patience time.Duration, do func(engine.Tx) error) error {
	return p.engine.Short(ctx, func(tx engine.Tx) error {
		if err := execAll(ctx, tx, p.dialect.LockTable(p.table(), mode, patience)...); err != nil {
			return err
		}
		return do(tx)
	})
}

func execAll(ctx context.Context, on engine.Executor, queries ...dialect.Query) error {
	for _, query := range queries {
		if _, err := on.Exec(ctx, query.Text, query.Args...); err != nil {
			return err
		}
	}
	return nil
}

// execTexts runs the statements that a query selects.
func (p *Partitions) execTexts(ctx context.Context, on engine.Executor, query dialect.Query) error {
	statements, err := p.engine.Texts(ctx, on, query)
	if err != nil {
		return err
	}
	for _, statement := range statements {
		if _, err := on.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}
