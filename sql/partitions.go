package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// PartitionsOptions of [Partitions].
type PartitionsOptions struct {
	// Table is the table's name, as in the repository's options.
	// Default: "watermill_inbox".
	Table string

	// IDs is the kind of the message ids, as in [PartitionedPostgreSQLSchema].
	// Required.
	IDs IDKind

	// Width is the time that a partition covers: whole minutes, at most 366 days, and so many that there are
	// at most 1000 partitions. It may be changed; what is there keeps its bounds.
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

	// Logger gets a line per pass of Run at info level when it made, retired or kept something, and failed passes of Run at
	// error level.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

const (
	maxPartitions = 1000 // a statement on the whole table has to plan for all of them
	maxWidth      = 366 * 24 * time.Hour
)

// Validate returns an error when the options cannot be used.
func (o PartitionsOptions) Validate() error {
	if _, err := ParseTable(o.Table); err != nil {
		return err
	}
	if !o.IDs.valid() {
		return errors.New("inboxsql: IDs must be UUIDv7 or ULID")
	}
	switch {
	case o.Retention <= 0:
		return fmt.Errorf("inboxsql: Retention must be positive, it is %s; to keep records for ever use a plain table", o.Retention)
	case o.Width < 0 || o.Ahead < 0 || o.Interval < 0:
		return fmt.Errorf("inboxsql: Width, Ahead or Interval is negative: %s, %s, %s", o.Width, o.Ahead, o.Interval)
	}
	o.setDefaults()
	switch {
	case o.Width%time.Minute != 0 || o.Width > maxWidth:
		return fmt.Errorf("inboxsql: Width must be whole minutes and at most %s, it is %s", maxWidth, o.Width)
	case o.Interval >= o.Ahead:
		return fmt.Errorf("inboxsql: Interval, %s, must be shorter than Ahead, %s, or partitions are made too late", o.Interval, o.Ahead)
	case o.Retention/o.Width+o.Ahead/o.Width > maxPartitions:
		return fmt.Errorf("inboxsql: Retention, %s, and Ahead, %s, need more than %d partitions of %s: choose a larger Width, or a plain table to keep records for ever",
			o.Retention, o.Ahead, maxPartitions, o.Width)
	}
	return nil
}

func (o *PartitionsOptions) setDefaults() {
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

// Partitions makes the partitions of an inbox table ahead of time, and retires those that are older than the
// retention: they are detached and dropped, together with their records. Somebody must run it, under the role that
// owns the table, see the schema file. Any number of instances may; whichever dies, at whatever point, another
// one goes on. Claims never wait for it, nor it for a claim, except to detach what is older than the retention.
//
// It takes one connection of the pool at a time, and keeps it for up to a minute while a partition is detached.
// It works on a pool of lib/pq or of pgx's database/sql driver; with pgxpool it is stdlib.OpenDBFromPool(pool).
type Partitions struct {
	db         *sql.DB
	schema     PartitionedPostgreSQLSchema
	repository *Repository
	options    PartitionsOptions
}

// PartitionsPass is what one pass did.
type PartitionsPass struct {
	// Created and Retired are the names of partitions that were made and dropped.
	Created, Retired []string

	// Blocked are partitions that are older than the retention and kept, because they hold messages that are
	// not known to be sent, see inbox.ListUnsent.
	Blocked []BlockedPartition

	// Left is how far ahead of the present the partitions reach.
	Left time.Duration
}

// BlockedPartition is a partition that cannot be retired.
type BlockedPartition struct {
	Partition string
	Unsent    int // records with messages that are not known to be sent
}

// NewPartitions returns Partitions for the table. It opens no connection and starts nothing.
func NewPartitions(db *sql.DB, options PartitionsOptions) (*Partitions, error) {
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.setDefaults()
	schema := PartitionedPostgreSQLSchema{IDs: options.IDs}
	repository, err := NewRepository(db, Options{SchemaAdapter: schema, Table: options.Table})
	if err != nil {
		return nil, err
	}
	return &Partitions{db: db, schema: schema, repository: repository, options: options}, nil
}

// failedPassPause is the longest pause after a pass that failed.
const failedPassPause = time.Minute

// Run makes a pass at once and then one per interval, until the context ends; it returns the context's error.
// A pass that fails is logged, and the next one goes on where it stopped.
func (p *Partitions) Run(ctx context.Context) error {
	for {
		pass, err := p.Pass(ctx)
		fields := watermill.LogFields{"created": pass.Created, "retired": pass.Retired, "blocked": pass.Blocked, "days_left": int(pass.Left.Hours() / 24)}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			p.options.Logger.Error("Inbox partitions pass failed", err, fields)
		case len(pass.Created)+len(pass.Retired)+len(pass.Blocked) > 0:
			p.options.Logger.Info("Inbox partitions pass done", fields)
		}
		wait := p.options.Interval
		if err != nil {
			wait = min(wait, failedPassPause)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// Pass makes the table if there is none, makes the partitions that are missing, and retires those that are older
// than the retention. Time is the database's, but nothing is retired that is younger by this machine's. Interrupted
// at any point it loses nothing. The pass is returned as far as it came, also with an error.
func (p *Partitions) Pass(ctx context.Context) (PartitionsPass, error) {
	var pass PartitionsPass
	if err := p.prepare(ctx); err != nil {
		return pass, err
	}
	// First what is missing: retiring may have to wait for handlers.
	err := p.create(ctx, &pass)
	err = errors.Join(err, p.retire(ctx, &pass))
	plan, now, listErr := p.plan(ctx, p.db)
	if listErr == nil {
		pass.Left = plan.left(now)
	}
	if err = errors.Join(err, listErr); err == nil && pass.Left == 0 {
		err = errNoPresent
	}
	return pass, err
}

var errNoPresent = errors.New("inboxsql: there is no partition for the present, and none is made below the oldest one: the database's clock is behind, or somebody has made later partitions first")

// prepare makes the table if there is none, and refuses one that is not partitioned as it must be.
func (p *Partitions) prepare(ctx context.Context) error {
	if err := p.repository.find(ctx); err != nil {
		return fmt.Errorf("inboxsql: cannot look for the table: %w", err)
	}
	var there bool
	if err := p.db.QueryRowContext(ctx, `SELECT `+regclass(p.table())+` IS NOT NULL`).Scan(&there); err != nil {
		return fmt.Errorf("inboxsql: cannot look for the table: %w", err)
	}
	if !there {
		if err := errors.Join(p.repository.initializeSchema(ctx), p.repository.find(ctx)); err != nil {
			return fmt.Errorf("inboxsql: cannot initialize the schema: %w", err)
		}
	}
	problems, err := p.repository.texts(ctx, p.schema.shapeQuery(CheckParams{Table: p.table()}))
	if err != nil {
		return fmt.Errorf("inboxsql: cannot check the schema: %w", err)
	}
	if len(problems) > 0 {
		return &CheckError{Table: p.table().Quoted(), Problems: problems}
	}
	return nil
}

func (p *Partitions) table() Table { return p.repository.table() }

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
