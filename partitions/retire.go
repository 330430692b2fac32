package partitions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// detachPatience is how long a pass waits for the transactions that may still use a partition, before it leaves
// the rest to the next pass.
const detachPatience = time.Minute

// retire detaches and drops the partitions that are older than the retention.
func (p *Partitions) retire(ctx context.Context, pass *Pass) error {
	list, now, err := p.readLayout(ctx, p.pool)
	if err != nil {
		return err
	}
	// A wrong clock must not drop everything: it is over when this machine thinks so as well.
	if here := time.Now(); here.Before(now) {
		now = here
	}
	var errs []error
	for _, part := range list.partitions {
		var err error
		switch {
		case part.pending:
			if err = p.detach(ctx, part, "FINALIZE"); err == nil && part.retired {
				err = p.drop(ctx, part, pass)
			}
		case !part.attached:
			err = p.drop(ctx, part, pass)
		case list.expired(part, now):
			err = p.retireOne(ctx, part, pass)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !p.isGone(ctx, part) {
			errs = append(errs, fmt.Errorf("partitions: cannot retire partition %s: %w", part.name.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// isGone reports whether another instance has dropped the partition.
func (p *Partitions) isGone(ctx context.Context, part partition) bool {
	list, _, err := p.readLayout(ctx, p.pool)
	return err == nil && !list.isAttached(part) && !list.isDetached(part)
}

func (p *Partitions) retireOne(ctx context.Context, part partition, pass *Pass) error {
	if label := part.label(p.table()); part.comment != label {
		err := p.alter(ctx, func(tx engine.Tx) error {
			return execAll(ctx, tx, p.dialect.Comment(part.name, label))
		})
		if err != nil {
			return err
		}
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
	statement := p.dialect.Detach(p.table(), part.name, how)
	err := execAll(patient, p.pool, statement)
	if dialect.SQLState(err) == stateDeadlock {
		// With another instance that has been waiting in the same detachment, and has gone on now.
		err = execAll(patient, p.pool, statement)
	}
	if err == nil {
		return nil
	}
	if dialect.SQLState(err) == stateNotReady {
		return nil // another instance is detaching one; only one can be pending, and a pass looks again
	}
	if list, _, listErr := p.readLayout(ctx, p.pool); listErr == nil && !list.isAttached(part) {
		return nil // by another instance
	}
	if patient.Err() != nil {
		return fmt.Errorf("cannot detach it, transactions of more than %s are open: %w", detachPatience, err)
	}
	return fmt.Errorf("cannot detach it: %w", err)
}

// drop drops a detached partition.
func (p *Partitions) drop(ctx context.Context, part partition, pass *Pass) error {
	dropped := false
	err := p.alter(ctx, func(tx engine.Tx) error {
		if list, _, err := p.readLayout(ctx, tx); err != nil || !list.isDetached(part) {
			return err // another instance has done it
		}
		dropped = true
		return execAll(ctx, tx, p.dialect.Drop(part.name))
	})
	if err == nil && dropped {
		pass.Retired = append(pass.Retired, part.name.Name())
	}
	return err
}
