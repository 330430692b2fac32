package inbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// CleanerOptions of a [Cleaner].
type CleanerOptions struct {
	// Retention is how long a record is kept after its message was claimed, so it includes the handler's
	// time. A copy that arrives later runs again, so it must be longer than the longest way a message can
	// come back: the broker's TTL, a dead-letter queue, a replay by hand.
	// Required.
	Retention time.Duration

	// BatchSize is how many records one statement deletes.
	// Default: 1000.
	BatchSize int

	// BatchPause is the pause between two batches of a pass, which leaves room for claims.
	// Default: 10 milliseconds.
	BatchPause time.Duration

	// Interval is the pause between two passes of Run, varied by a tenth so that instances spread out.
	// Default: 1 hour.
	Interval time.Duration

	// Logger gets a line per pass at info level when it deleted or kept something unsent, and failed
	// passes of Run at error level.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Validate returns an error when the options cannot be used.
func (o CleanerOptions) Validate() error {
	switch {
	case o.Retention <= 0:
		return fmt.Errorf("inbox: Retention must be positive, it is %s", o.Retention)
	case o.BatchSize < 0:
		return fmt.Errorf("inbox: BatchSize is negative: %d", o.BatchSize)
	case o.BatchPause < 0 || o.Interval < 0:
		return fmt.Errorf("inbox: BatchPause or Interval is negative: %s, %s", o.BatchPause, o.Interval)
	}
	return nil
}

func (o *CleanerOptions) setDefaults() {
	if o.BatchSize == 0 {
		o.BatchSize = 1000
	}
	if o.BatchPause == 0 {
		o.BatchPause = 10 * time.Millisecond
	}
	if o.Interval == 0 {
		o.Interval = time.Hour
	}
	if o.Logger == nil {
		o.Logger = watermill.NopLogger{}
	}
}

// Cleaner deletes records that are older than the retention. Nothing is ever deleted unless a Cleaner is
// made and run. Any number of instances may run one on the same table.
type Cleaner struct {
	repository Repository
	options    CleanerOptions
}

// CleanerPass is what one pass did.
type CleanerPass struct {
	// Deleted is the number of records deleted.
	Deleted int

	// Unsent is the number of expired records that are kept, because they hold messages that are not
	// known to be sent.
	Unsent int
}

// NewCleaner returns a cleaner. It starts nothing.
func NewCleaner(repository Repository, options CleanerOptions) (*Cleaner, error) {
	if repository == nil {
		return nil, errors.New("inbox: repository is nil")
	}
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.setDefaults()
	return &Cleaner{repository: repository, options: options}, nil
}

// failedPassPause is the longest pause after a pass that failed.
const failedPassPause = time.Minute

// Run makes a pass at once and then one per interval, until the context ends; it returns the context's
// error. A pass that fails is logged, and the next one goes on where it stopped.
func (c *Cleaner) Run(ctx context.Context) error {
	for {
		pass, err := c.Pass(ctx)
		fields := watermill.LogFields{"deleted": pass.Deleted, "unsent": pass.Unsent, "retention": c.options.Retention}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			c.options.Logger.Error("Inbox cleaner pass failed", err, fields)
		case pass != CleanerPass{}:
			c.options.Logger.Info("Inbox cleaner pass done", fields)
		}
		wait := c.options.Interval
		if err != nil {
			wait = min(wait, failedPassPause)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// Pass deletes all records that are older than the retention, in batches, each in a transaction of its
// own. Interrupted at any point it loses nothing. The pass is returned as far as it came, also with an
// error.
func (c *Cleaner) Pass(ctx context.Context) (CleanerPass, error) {
	var pass CleanerPass
	for {
		deleted, err := c.repository.DeleteProcessed(ctx, c.options.Retention, c.options.BatchSize)
		pass.Deleted += deleted
		if err != nil {
			return pass, err
		}
		if deleted < c.options.BatchSize {
			break
		}
		if err := pause(ctx, c.options.BatchPause); err != nil {
			return pass, err
		}
	}
	unsent, err := c.repository.CountUnsent(ctx, c.options.Retention)
	pass.Unsent = unsent
	return pass, err
}

// pause waits for the duration, give or take a tenth, or for the context's end.
func pause(ctx context.Context, d time.Duration) error {
	if tenth := int64(d / 10); tenth > 0 {
		d += time.Duration(rand.Int64N(2*tenth) - tenth)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
