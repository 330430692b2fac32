package inbox

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// CleanerOptions of a [Cleaner].
type CleanerOptions struct {
	// Consumers are those that the service owns; records of others are never touched. Services that share a table
	// each run a cleaner for their own.
	// Required.
	Consumers Consumers

	// Retention is how long records are kept. It names no consumer that the service does not own.
	// Required.
	Retention Retention

	// UnsentRetention is how long stored messages are kept that are not known to be sent, if that is longer than their
	// consumer's retention. Those of each record that are deleted are logged at error level with its key: they may
	// never have been sent.
	// Default: 0, which keeps them for ever, also when their record is deleted.
	UnsentRetention time.Duration

	// BatchSize is how many records one transaction deletes. After a batch that took longer than BatchTimeout,
	// or than the server allows (statement_timeout, lock_timeout), the rest of the pass makes smaller ones.
	// Default: 1000.
	BatchSize int

	// BatchPause is the pause between two batches, varied by a tenth, which leaves room for claims. With a
	// BatchSize of 100 and a BatchPause of 20 milliseconds claims hardly notice.
	// Default: 10 milliseconds.
	BatchPause time.Duration

	// BatchTimeout bounds one transaction, and one count of what is kept. A deletion of processed records is not
	// charged for its wait for a connection.
	// Default: 5 seconds.
	BatchTimeout time.Duration

	// Interval is the pause between two passes of Run, varied by a tenth so that instances spread out.
	// Default: 1 hour.
	Interval time.Duration

	// Observe is called after each batch and at the end of a pass with what the pass has done so far, by one
	// goroutine at a time.
	// Default: nil.
	Observe func(ctx context.Context, observation CleanerObservation)

	// Logger gets a line per pass of Run at info level when it deleted or kept something unsent. At error level it
	// gets passes of Run that failed, once each retention of a consumer that has no records while one without a
	// retention of its own has, unsent records that are deleted, and in each pass that the table has no index for it.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Validate returns an error when the options cannot be used.
func (o CleanerOptions) Validate() error {
	if err := o.Retention.Validate(); err != nil {
		return err
	}
	if err := o.Consumers.Validate(); err != nil {
		return err
	}
	for consumer := range o.Retention.Consumers {
		if !o.Consumers.Contains(consumer) {
			return fmt.Errorf("inbox: there is a retention of consumer %q, which is not one of Consumers", consumer)
		}
	}
	switch {
	case o.UnsentRetention < 0:
		return fmt.Errorf("inbox: UnsentRetention is negative: %s", o.UnsentRetention)
	case o.BatchSize < 0:
		return fmt.Errorf("inbox: BatchSize is negative: %d", o.BatchSize)
	case o.BatchPause < 0 || o.BatchTimeout < 0 || o.Interval < 0:
		return fmt.Errorf("inbox: BatchPause, BatchTimeout or Interval is negative: %s, %s, %s", o.BatchPause, o.BatchTimeout, o.Interval)
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
	if o.BatchTimeout == 0 {
		o.BatchTimeout = 5 * time.Second
	}
	if o.Interval == 0 {
		o.Interval = time.Hour
	}
	if o.Logger == nil {
		o.Logger = watermill.NopLogger{}
	}
}
