// Package partitions keeps a partitioned inbox of PostgreSQL in shape. Where all message ids are UUIDv7s, or all are
// ULIDs, the table can be partitioned by them: the key is the same and stays unique, and old records go with their
// partition instead of by DELETE. [Partitions] makes and retires the partitions; [Partitions.Convert] turns a plain
// table into such a one. Repositories claim in it with inboxsql.PartitionedPostgreSQLSchema, or with
// inboxpgx.Options.IDs.
package partitions

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
	"github.com/devmappa/watermill-inbox/internal/interval"
	"github.com/devmappa/watermill-inbox/internal/sqlpool"
)

// ErrNoPartition: no partition of a partitioned inbox takes the message's id, and the id is not below the
// window that the partitions cover. A partition is missing, because nobody runs [Partitions], or the clock
// that made the id is ahead. A repository returns it from Claim. Transient: the message stays with the broker until
// the partition is there.
var ErrNoPartition = dialect.ErrNoPartition

// Partitions makes the partitions of an inbox table ahead of time, and retires those that are older than the
// retention: they are detached and dropped, together with their records. Somebody must run it, under the role that
// owns the table, see the schema file. Any number of instances may; whichever dies, at whatever point, another
// one goes on. Claims never wait for it, nor it for a claim, except to detach what is older than the retention.
//
// It takes one connection of the pool at a time, and keeps it for up to a minute while a partition is detached.
// It works on a pool of lib/pq or of pgx's database/sql driver; with pgxpool it is stdlib.OpenDBFromPool(pool).
type Partitions struct {
	pool    *sqlpool.Pool
	dialect dialect.Partitioned
	engine  *engine.Engine
	options Options
}

// Pass is what one pass did.
type Pass struct {
	// Created and Retired are the names of partitions that were made and dropped.
	Created, Retired []string

	// Left is how far ahead of the present the partitions reach.
	Left time.Duration
}

// New returns Partitions for the table. It opens no connection and starts nothing.
func New(db *sql.DB, options Options) (*Partitions, error) {
	if db == nil {
		return nil, errors.New("partitions: db is nil")
	}
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.setDefaults()
	p := &Partitions{pool: sqlpool.New(db, nil), dialect: dialect.Partitioned{IDs: options.IDs}, options: options}
	var err error
	p.engine, err = engine.New(engine.Config{
		Version: engine.Version, Package: "partitions", Pool: p.pool, Dialect: p.dialect, Table: options.Table,
	})
	return p, err
}

// failedPassPause is the longest pause after a pass that failed.
const failedPassPause = time.Minute

// Run makes a pass at once and then one per interval, until the context ends; it returns the context's error.
// A pass that fails is logged, and the next one goes on where it stopped.
func (p *Partitions) Run(ctx context.Context) error {
	for {
		pass, err := p.Pass(ctx)
		fields := watermill.LogFields{"created": pass.Created, "retired": pass.Retired, "days_left": int(pass.Left.Hours() / 24)}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			p.options.Logger.Error("Inbox partitions pass failed", err, fields)
		case len(pass.Created)+len(pass.Retired) > 0:
			p.options.Logger.Info("Inbox partitions pass done", fields)
		}
		wait := p.options.Interval
		if err != nil {
			wait = min(wait, failedPassPause)
		}
		if err := interval.Wait(ctx, wait); err != nil {
			return err
		}
	}
}

// Observation is what became of one pass. See [Options].Observe.
type Observation struct {
	Pass

	// Err is what Pass returns.
	Err error
}

// Pass makes the table if there is none, makes the partitions that are missing, and retires those that are older
// than the retention. Time is the database's, but nothing is retired that is younger by this machine's. Interrupted
// at any point it loses nothing. The pass is returned as far as it came, also with an error.
func (p *Partitions) Pass(ctx context.Context) (Pass, error) {
	var pass Pass
	err := p.pass(ctx, &pass)
	if p.options.Observe != nil {
		p.options.Observe(ctx, Observation{Pass: pass, Err: err})
	}
	return pass, err
}

func (p *Partitions) pass(ctx context.Context, pass *Pass) error {
	if err := p.prepare(ctx); err != nil {
		return err
	}
	// First what is missing: retiring may have to wait for handlers.
	err := p.create(ctx, pass)
	err = errors.Join(err, p.retire(ctx, pass))
	list, now, listErr := p.readLayout(ctx, p.pool)
	if listErr == nil {
		pass.Left = list.left(now)
	}
	if err = errors.Join(err, listErr); err == nil && pass.Left == 0 {
		err = errNoPresent
	}
	return err
}

var errNoPresent = errors.New("partitions: there is no partition for the present, and none is made below the oldest one: the database's clock is behind, or somebody has made later partitions first")

// leastServer has DETACH CONCURRENTLY. On an older one a table could be made, and nothing could be retired.
const leastServer = 140000

// locate looks for the table, on a server that can keep it.
func (p *Partitions) locate(ctx context.Context) error {
	if err := p.engine.CheckBy(ctx, p.dialect.CheckServer(leastServer)); err != nil {
		return err
	}
	return p.engine.Locate(ctx)
}

// prepare makes the table if there is none, and refuses one that is not partitioned as it must be.
func (p *Partitions) prepare(ctx context.Context) error {
	if err := p.locate(ctx); err != nil {
		return err
	}
	var there bool
	if err := p.pool.Query(ctx, p.dialect.Exists(p.table()), []any{&there}, func() error { return nil }); err != nil {
		return fmt.Errorf("partitions: cannot look for the table: %w", err)
	}
	if !there {
		if err := p.engine.Create(ctx); err != nil {
			return err
		}
	}
	return p.engine.CheckBy(ctx, p.dialect.CheckShape(p.table()))
}

func (p *Partitions) table() dialect.Table { return p.engine.Table() }
