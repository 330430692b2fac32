package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/devmappa/watermill-inbox/internal/interval"
)

// Cleaner deletes records of a service's consumers that are older than their retention. Nothing is ever deleted unless a Cleaner is
// made and run. Any number of instances may run one on the same table; one of them works at a time, and when it
// dies another goes on.
type Cleaner struct {
	records Records
	options CleanerOptions
	unknown sync.Map // consumers of which it was said that they have no records
}

// CleanerPass is what one pass did.
type CleanerPass struct {
	// Deleted is the number of records deleted.
	Deleted int

	// Unsent is the number of records whose messages were stored longer ago than the retention, and are kept because
	// they are not known to be sent. [ListUnsent] lists them.
	Unsent int

	// UnsentDeleted is the number of records whose messages were deleted all the same, see
	// [CleanerOptions].UnsentRetention.
	UnsentDeleted int

	// Implausible is the number of records that say they were claimed before this module existed: a clock was wrong. They
	// are kept, because they may be young.
	Implausible int

	// Yielded: another cleaner was at work, so this one left the rest to it.
	Yielded bool
}

// NewCleaner returns a cleaner. It starts nothing.
func NewCleaner(records Records, options CleanerOptions) (*Cleaner, error) {
	if records == nil {
		return nil, errors.New("inbox: records is nil")
	}
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.setDefaults()
	return &Cleaner{records: records, options: options}, nil
}

// CleanerObservation is what a pass has done so far. See [CleanerOptions].Observe.
type CleanerObservation struct {
	CleanerPass

	// Done: the pass is over.
	Done bool

	// Err is what Pass returns.
	Err error
}

func (c *Cleaner) observe(ctx context.Context, pass CleanerPass, done bool, err error) {
	if c.options.Observe != nil {
		c.options.Observe(ctx, CleanerObservation{CleanerPass: pass, Done: done, Err: err})
	}
}

// failedPassPause is the longest pause after a pass that failed.
const failedPassPause = time.Minute

// Run makes a pass at once and then one per interval, until the context ends; it returns the context's
// error. A pass that fails is logged, and the next one goes on where it stopped.
func (c *Cleaner) Run(ctx context.Context) error {
	for {
		pass, err := c.Pass(ctx)
		fields := watermill.LogFields{"deleted": pass.Deleted, "unsent": pass.Unsent, "unsent_deleted": pass.UnsentDeleted, "implausible": pass.Implausible}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			c.options.Logger.Error("Inbox cleaner pass failed", err, fields)
		case pass.Implausible > 0:
			c.options.Logger.Error("Inbox cleaner keeps records that say they are older than this module", nil, fields)
		case pass.Deleted+pass.Unsent+pass.UnsentDeleted > 0:
			c.options.Logger.Info("Inbox cleaner pass done", fields)
		}
		wait := c.options.Interval
		if err != nil {
			wait = min(wait, failedPassPause)
		}
		if err := interval.Wait(ctx, wait); err != nil {
			return err
		}
	}
}

// Pass deletes all records that are older than their retention, in batches, each in a transaction of its own.
// Interrupted at any point it loses nothing. The pass is returned as far as it came, also with an error. A consumer
// whose records cannot be deleted does not keep the others' from being deleted.
//
// How old a record is, is judged by the database's time at the beginning of the pass. It deletes nothing when that
// differs from this process's time by more than an hour, or a quarter of the shortest retention.
func (c *Cleaner) Pass(ctx context.Context) (CleanerPass, error) {
	var pass CleanerPass
	err := c.pass(ctx, &pass)
	c.observe(ctx, pass, true, err)
	return pass, err
}

func (c *Cleaner) pass(ctx context.Context, pass *CleanerPass) error {
	consumers, now, err := c.records.Consumers(ctx)
	if err != nil {
		return err
	}
	if difference := time.Since(now).Abs(); difference > c.clockTolerance() {
		return fmt.Errorf("inbox: the clocks of the database and of this process differ by %s, nothing is deleted", difference)
	}
	unnamed := slices.ContainsFunc(consumers, func(consumer string) bool {
		_, named := c.options.Retention.Consumers[consumer]
		return !named && c.options.Consumers.Contains(consumer)
	})
	for consumer := range c.options.Retention.Consumers {
		if !unnamed || slices.Contains(consumers, consumer) {
			continue
		}
		// One of the unnamed may be the one that is meant, and about to lose its records.
		if _, said := c.unknown.LoadOrStore(consumer, true); !said {
			c.options.Logger.Error("Retention of a consumer that has no records, is the name right?", nil, watermill.LogFields{"consumer": consumer})
		}
	}
	failures := []error{c.advise(ctx)}
	size := c.options.BatchSize
	for _, consumer := range consumers {
		if !c.options.Consumers.Contains(consumer) || c.options.Retention.For(consumer) == KeepForever {
			continue
		}
		err := c.cleanConsumer(ctx, consumer, now, &size, pass)
		if errors.Is(err, ErrCleaning) {
			pass.Yielded = true
			break
		}
		if ctx.Err() != nil {
			return err
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

// advise logs what makes the cleaner slow.
func (c *Cleaner) advise(ctx context.Context) error {
	adviser, ok := c.records.(Adviser)
	if !ok {
		return nil
	}
	advice, err := adviser.Advice(ctx)
	for _, sentence := range advice {
		c.options.Logger.Error("Inbox cleaner is slow", nil, watermill.LogFields{"advice": sentence})
	}
	return err
}

func (c *Cleaner) clockTolerance() time.Duration {
	shortest := c.options.Retention.Default
	for _, own := range c.options.Retention.Consumers {
		shortest = min(shortest, own)
	}
	return clockTolerance(shortest)
}

// cleanConsumer counts last: what cannot be counted does not keep anything from being deleted.
func (c *Cleaner) cleanConsumer(ctx context.Context, consumer string, now time.Time, size *int, pass *CleanerPass) error {
	retention := c.options.Retention.For(consumer)
	before := now.Add(-retention)
	err := c.deleteProcessed(ctx, consumer, before, size, pass)
	if errors.Is(err, ErrCleaning) {
		return err
	}
	if c.options.UnsentRetention > 0 {
		err = errors.Join(err, c.deleteUnsent(ctx, consumer, now.Add(-max(retention, c.options.UnsentRetention)), pass))
	}
	return errors.Join(err,
		c.count(ctx, Selection{Consumer: consumer, To: before, Unsent: true}, &pass.Unsent),
		c.count(ctx, Selection{Consumer: consumer, To: earliestRecord}, &pass.Implausible))
}

// count adds the number of selected records.
func (c *Cleaner) count(ctx context.Context, selection Selection, total *int) error {
	ctx, cancel := context.WithTimeout(ctx, c.options.BatchTimeout)
	defer cancel()
	n, err := c.records.CountRecords(ctx, selection)
	*total += n
	return err
}

// smallestBatch is not made smaller after a timeout.
const smallestBatch = 10

// earliestRecord is before the first version of this module.
var earliestRecord = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// A batch that was cancelled can hold the cleaners' lock until the server has noticed. The next batches try this often,
// with this pause, before they believe that another cleaner is at work.
const (
	lingerTries = 20
	lingerPause = 50 * time.Millisecond
)

// deleteProcessed goes on from the last record that was deleted, because the database may still have to step over those
// before it.
func (c *Cleaner) deleteProcessed(ctx context.Context, consumer string, before time.Time, size *int, pass *CleanerPass) error {
	params := DeleteProcessedParams{Consumer: consumer, From: earliestRecord, Before: before, Timeout: c.options.BatchTimeout}
	for lingering := 0; ; {
		params.Limit = *size
		deleted, last, err := c.records.DeleteProcessed(ctx, params)
		pass.Deleted += deleted
		pause := c.options.BatchPause
		switch {
		case errors.Is(err, ErrBatchTimeout) && *size > smallestBatch:
			*size = max(*size/2, smallestBatch)
			lingering = lingerTries
		case errors.Is(err, ErrCleaning) && lingering > 0:
			lingering--
			pause = lingerPause
		case err != nil:
			return err
		case deleted < *size:
			return nil
		default:
			params.From = last
			c.observe(ctx, *pass, false, nil)
		}
		if err := interval.Wait(ctx, pause); err != nil {
			return err
		}
	}
}

// deleteUnsent deletes what nobody is expected to send any more, and says what that was.
func (c *Cleaner) deleteUnsent(ctx context.Context, consumer string, before time.Time, pass *CleanerPass) error {
	const batchSize = 100
	selection := Selection{Consumer: consumer, To: before, Unsent: true}
	for after := (Record{}); ; {
		found, err := c.records.FindRecords(ctx, selection, after, batchSize)
		if err != nil || len(found) == 0 {
			return err
		}
		for _, f := range found {
			c.options.Logger.Error("Deleting stored messages that may never have been sent", nil, watermill.LogFields{
				"consumer": f.Key.Consumer, "message_id": f.Key.MessageID, "processed_at": f.ProcessedAt,
			})
		}
		batch, cancel := context.WithTimeout(ctx, c.options.BatchTimeout)
		deleted, err := deleteFound(batch, c.records, selection, after, found, c.records.DeleteUnsent)
		cancel()
		pass.UnsentDeleted += deleted
		if err != nil {
			return err
		}
		after = found[len(found)-1]
		c.observe(ctx, *pass, false, nil)
		if err := interval.Wait(ctx, c.options.BatchPause); err != nil {
			return err
		}
	}
}
