// Package interval is the pause between the passes of what keeps house: the cleaner and the partitions.
package interval

import (
	"context"
	"math"
	"math/rand/v2"
	"time"
)

// Wait waits for the duration, give or take a tenth so that instances spread out, or for the context's end, whose
// error it returns.
func Wait(ctx context.Context, d time.Duration) error {
	if tenth := int64(d / 10); tenth > 0 {
		d -= time.Duration(tenth) // first, since the longest duration is allowed
		d += time.Duration(min(rand.Int64N(2*tenth), math.MaxInt64-int64(d)))
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
