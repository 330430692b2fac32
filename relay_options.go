package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// RelayOptions of a [Relay].
type RelayOptions struct {
	// Publishers publish the messages of the consumers that the service owns, by their names in the records. A consumer
	// that is not named is never touched: it may be another service's, with another broker. A publisher's nil must mean
	// "stored".
	// Required.
	Publishers map[string]message.Publisher

	// Age is how long ago messages must have been stored: until then the router is expected to publish them. It must be
	// longer than Options.PublishBackOff, or messages are published twice.
	// Default: 5 minutes.
	Age time.Duration

	// GiveUp is how long ago messages may have been stored that are still published. Older ones stay for an operator,
	// see [ListUnsent], and for CleanerOptions.UnsentRetention.
	// Default: 0, never.
	GiveUp time.Duration

	// Lease is how long one instance keeps the others from publishing the same messages. Messages of an instance that
	// dies are published when it is over; those of a publish that takes longer are published twice.
	// Default: 1 minute.
	Lease time.Duration

	// BatchSize is how many records are leased at a time.
	// Default: 50.
	BatchSize int

	// Interval is the pause between two passes of Run, varied by a tenth so that instances spread out.
	// Default: 30 seconds.
	Interval time.Duration

	// Observe is called at the end of each pass over one consumer, by the goroutine that makes it.
	// Default: nil.
	Observe func(ctx context.Context, observation RelayObservation)

	// Logger gets a line at info level per pass over a consumer that published something. At error level it gets passes
	// that failed, and messages that cannot be read or are given up, a line per pass.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Validate returns an error when the options cannot be used.
func (o RelayOptions) Validate() error {
	if len(o.Publishers) == 0 {
		return errors.New("inbox: Publishers names no consumer")
	}
	for consumer, publisher := range o.Publishers {
		if err := validatePart("consumer", consumer); err != nil {
			return fmt.Errorf("inbox: publishers: %w", err)
		}
		if publisher == nil {
			return fmt.Errorf("inbox: the publisher of consumer %q is nil", consumer)
		}
	}
	switch {
	case o.Age < 0 || o.GiveUp < 0 || o.Lease < 0 || o.Interval < 0:
		return fmt.Errorf("inbox: Age, GiveUp, Lease or Interval is negative: %s, %s, %s, %s", o.Age, o.GiveUp, o.Lease, o.Interval)
	case o.BatchSize < 0:
		return fmt.Errorf("inbox: BatchSize is negative: %d", o.BatchSize)
	}
	o.setDefaults()
	if o.GiveUp > 0 && o.GiveUp <= o.Age {
		return fmt.Errorf("inbox: GiveUp, %s, is not longer than Age, %s, so nothing would be published", o.GiveUp, o.Age)
	}
	return nil
}

func (o *RelayOptions) setDefaults() {
	if o.Age == 0 {
		o.Age = 5 * time.Minute
	}
	if o.Lease == 0 {
		o.Lease = time.Minute
	}
	if o.BatchSize == 0 {
		o.BatchSize = 50
	}
	if o.Interval == 0 {
		o.Interval = 30 * time.Second
	}
	if o.Logger == nil {
		o.Logger = watermill.NopLogger{}
	}
}
