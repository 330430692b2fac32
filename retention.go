package inbox

import (
	"fmt"
	"math"
	"time"
)

// KeepForever is the retention of records that are never deleted because of their age.
const KeepForever time.Duration = math.MaxInt64

// Retention is how long records are kept after their message was claimed, so it includes the handler's time.
// A copy that arrives later runs again, so it must be longer than the longest way on which a message can come
// back: the broker's TTL, a dead-letter queue, a replay by hand.
//
// Give the same one to the [Cleaner] and to [TooOldOptions].
type Retention struct {
	// Default is for all consumers that are not named below. KeepForever is a choice like any other.
	// Required.
	Default time.Duration

	// Consumers have a retention of their own, by their name as in the records, see [Options].Consumer.
	Consumers map[string]time.Duration
}

// For returns the retention of a consumer.
func (r Retention) For(consumer string) time.Duration {
	if own, ok := r.Consumers[consumer]; ok {
		return own
	}
	return r.Default
}

// Clocks may be apart by a quarter of a retention, but not by more than an hour, and always by a minute. The cleaner
// deletes nothing when the database's and this process's differ by more; and the guard for messages that are too old
// begins that much before the end of the retention, because the producer's clock may be ahead of the one by which
// records are deleted.
const (
	maxClockDifference = time.Hour
	minClockDifference = time.Minute
)

func clockTolerance(retention time.Duration) time.Duration {
	return max(minClockDifference, min(maxClockDifference, retention/4))
}

// Validate returns an error unless every duration is positive.
func (r Retention) Validate() error {
	if r.Default <= 0 {
		return fmt.Errorf("inbox: the default retention must be positive, it is %s; inbox.KeepForever keeps all records", r.Default)
	}
	for consumer, own := range r.Consumers {
		if own <= 0 {
			return fmt.Errorf("inbox: the retention of consumer %q must be positive, it is %s", consumer, own)
		}
		if err := validatePart("consumer", consumer); err != nil {
			return fmt.Errorf("inbox: retention: %w", err)
		}
	}
	return nil
}
