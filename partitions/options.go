package partitions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// Options of [Partitions].
type Options struct {
	// Table is the table's name, as in the repository's options.
	// Default: "watermill_inbox".
	Table string

	// IDs is the kind of the message ids, as in inboxsql.PartitionedPostgreSQLSchema.
	// Required.
	IDs inbox.IDKind

	// Width is the time that a partition covers: whole minutes, at most 366 days, and so many that there are
	// at most 1000 partitions. It may be changed; what is there keeps its bounds. The first partition, and one that
	// fills a gap, begins earlier, so that there is one for the present at once.
	// Default: 24 hours.
	Width time.Duration

	// Ahead is how far into the future partitions are made. So long may nobody run Partitions before claims fail;
	// and so far may the clock of a producer be ahead.
	// Default: 7 days.
	Ahead time.Duration

	// Retention is how long records are kept, counted from the time in the message's id and to the end of its
	// partition. An older message is refused with inbox.ErrTooOld. It must be longer than the longest way a
	// message can come back: the broker's TTL, a dead-letter queue, a replay by hand. One table has one
	// retention, for all its consumers, and none is for ever: for that keep a plain table. A longer
	// one brings nothing back.
	// Required.
	Retention time.Duration

	// Interval is the pause between two passes of Run, varied by a tenth so that instances spread out. It must be
	// shorter than Ahead.
	// Default: 1 hour.
	Interval time.Duration

	// Observe is called at the end of each pass, by the goroutine that makes it.
	// Default: nil.
	Observe func(ctx context.Context, observation Observation)

	// Logger gets a line per pass of Run at info level when it made or retired something, and failed passes of Run at
	// error level.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

const (
	maxPartitions = 1000 // a statement on the whole table has to plan for all of them
	maxWidth      = 366 * 24 * time.Hour
)

// Validate returns an error when the options cannot be used.
func (o Options) Validate() error {
	if _, err := dialect.ParseTable(o.Table); err != nil {
		return err
	}
	if !o.IDs.Valid() {
		return errors.New("partitions: IDs must be UUIDv7 or ULID")
	}
	switch {
	case o.Retention <= 0:
		return fmt.Errorf("partitions: Retention must be positive, it is %s; to keep records for ever use a plain table", o.Retention)
	case o.Width < 0 || o.Ahead < 0 || o.Interval < 0:
		return fmt.Errorf("partitions: Width, Ahead or Interval is negative: %s, %s, %s", o.Width, o.Ahead, o.Interval)
	}
	o.setDefaults()
	switch {
	case o.Width%time.Minute != 0 || o.Width > maxWidth:
		return fmt.Errorf("partitions: Width must be whole minutes and at most %s, it is %s", maxWidth, o.Width)
	case o.Interval >= o.Ahead:
		return fmt.Errorf("partitions: Interval, %s, must be shorter than Ahead, %s, or partitions are made too late", o.Interval, o.Ahead)
	case o.Retention/o.Width+o.Ahead/o.Width > maxPartitions:
		return fmt.Errorf("partitions: Retention, %s, and Ahead, %s, need more than %d partitions of %s: choose a larger Width, or a plain table to keep records for ever",
			o.Retention, o.Ahead, maxPartitions, o.Width)
	}
	return nil
}

func (o *Options) setDefaults() {
	if o.Width == 0 {
		o.Width = 24 * time.Hour
	}
	if o.Ahead == 0 {
		o.Ahead = 7 * 24 * time.Hour
	}
	if o.Interval == 0 {
		o.Interval = time.Hour
	}
	if o.Logger == nil {
		o.Logger = watermill.NopLogger{}
	}
}
