package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/lib/pq"
)

// detachPatience is how long a pass waits for the transactions that may still use a partition, before it leaves
// the rest to the next pass.
const detachPatience = time.Minute

// retire detaches and drops the partitions that are older than the retention.
func (p *Partitions) retire(ctx context.Context, pass *PartitionsPass) error {
	plan, now, err := p.plan(ctx, p.db)
	if err != nil {
		return err
	}
	// A wrong clock must not drop everything: it is over when this machine thinks so as well.
	if here := time.Now(); here.Before(now) {
		now = here
	}
	var errs []error
	for _, part := range plan.partitions {
		var err error
		switch {
		case part.pending:
			if err = p.detach(ctx, part, "FINALIZE"); err == nil && part.retired {
				err = p.drop(ctx, part, pass)
			}
		case !part.attached:
			err = p.drop(ctx, part, pass)
		case plan.expired(part, now):
			err = p.retireOne(ctx, part, pass)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !p.isGone(ctx, part) {
			errs = append(errs, fmt.Errorf("inboxsql: cannot retire partition %s: %w", part.name.name, err))
		}
	}
	return errors.Join(errs...)
}

// isGone reports whether another instance has dropped the partition.
func (p *Partitions) isGone(ctx context.Context, part partition) bool {
	plan, _, err := p.plan(ctx, p.db)
	return err == nil && !plan.isAttached(part) && !plan.isDetached(part)
}

func (p *Partitions) retireOne(ctx context.Context, part partition, pass *PartitionsPass) error {
	if mark := part.mark(p.table()); part.comment != mark {
		err := p.alter(ctx, func(tx *sql.Tx) error {
			return execAll(ctx, tx, `COMMENT ON TABLE `+part.name.Quoted()+` IS `+pq.QuoteLiteral(mark))
		})
		if err != nil {
			return err
		}
	}
	unsent, err := p.countUnsent(ctx, p.db, part)
	if err != nil {
		return err
	}
	if unsent > 0 {
		pass.Blocked = append(pass.Blocked, BlockedPartition{part.name.name, unsent})
		return nil
	}
	if err := p.detach(ctx, part, "CONCURRENTLY"); err != nil {
		return err
	}
	return p.drop(ctx, part, pass)
}

const (
	stateNotReady = "55000" // DETACH while another detachment is pending
	stateDeadlock = "40P01"
)

// detach runs outside of a transaction. Claims do not wait for it; it waits for the transactions that have used
// the table before, and if it is interrupted, somebody must FINALIZE it.
func (p *Partitions) detach(ctx context.Context, part partition, how string) error {
	patient, cancel := context.WithTimeout(ctx, detachPatience)
	defer cancel()
	statement := `ALTER TABLE ` + p.table().Quoted() + ` DETACH PARTITION ` + part.name.Quoted() + ` ` + how
	_, err := p.db.ExecContext(patient, statement)
	if sqlState(err) == stateDeadlock {
		// With another instance that has been waiting in the same detachment, and has gone on now.
		_, err = p.db.ExecContext(patient, statement)
	}
	if err == nil {
		return nil
	}
	if sqlState(err) == stateNotReady {
		return nil // another instance is detaching one; only one can be pending, and a pass looks again
	}
	if plan, _, listErr := p.plan(ctx, p.db); listErr == nil && !plan.isAttached(part) {
		return nil // by another instance
	}
	if patient.Err() != nil {
		return fmt.Errorf("cannot detach it, transactions of more than %s are open: %w", detachPatience, err)
	}
	return fmt.Errorf("cannot detach it: %w", err)
}

// drop drops a detached partition. A handler that was open when the partition was looked at may have stored
// messages in it since: then it is attached again.
func (p *Partitions) drop(ctx context.Context, part partition, pass *PartitionsPass) error {
	dropped, unsent := false, 0
	err := p.alter(ctx, func(tx *sql.Tx) error {
		if plan, _, err := p.plan(ctx, tx); err != nil || !plan.isDetached(part) {
			return err // another instance has done it
		}
		err := execAll(ctx, tx, `LOCK TABLE `+part.name.Quoted()+` IN ACCESS EXCLUSIVE MODE`)
		if err != nil {
			return err
		}
		if unsent, err = p.countUnsent(ctx, tx, part); err != nil {
			return err
		}
		if unsent > 0 {
			return execAll(ctx, tx, p.attach(part))
		}
		dropped = true
		return execAll(ctx, tx, `DROP TABLE `+part.name.Quoted())
	})
	switch {
	case err != nil:
		return err
	case dropped:
		pass.Retired = append(pass.Retired, part.name.name)
	case unsent > 0:
		pass.Blocked = append(pass.Blocked, BlockedPartition{part.name.name, unsent})
	}
	return nil
}

func (p *Partitions) countUnsent(ctx context.Context, on querier, part partition) (count int, err error) {
	err = readRows(ctx, on, `SELECT count(*) FROM `+part.name.Quoted()+` WHERE "produced" IS NOT NULL AND "dispatched_at" IS NULL`,
		[]any{&count}, func() error { return nil })
	return count, err
}
