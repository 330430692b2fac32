//go:build unix

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
)

// fault is a kind of fault from outside. Inject returns when the cause is over; what is left is to recover.
type fault struct {
	name       string
	weight     int
	postgresql bool // only with PostgreSQL
	inject     func(ctx context.Context, run *run, random *rand.Rand) error
}

// patience is longer than the broker's (two heartbeats) and PostgreSQL's (idleLimit).
const patience = 3 * heartbeat

// hold is how long a bad network stays bad.
const hold = 4 * time.Second

// awayFor is longer than deliveryLimit lasts when every publish fails at once, than PublishBackOff, and than the relay's
// age.
const awayFor = 6 * time.Second

// outputAway lets the publishers of all workers fail, while everything else works.
var outputAway = fault{name: "output away", weight: 3, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
	if err := os.WriteFile(run.arena.awayFile(), nil, 0o600); err != nil {
		return err
	}
	_ = pause(ctx, awayFor)
	return os.Remove(run.arena.awayFile())
}}

var faults = []fault{
	outputAway,
	{name: "worker killed (SIGKILL)", weight: 6, inject: func(_ context.Context, run *run, random *rand.Rand) error {
		run.crew.signal(random, syscall.SIGKILL)
		return nil
	}},
	{name: "worker terminated (SIGTERM)", weight: 3, inject: func(_ context.Context, run *run, random *rand.Rand) error {
		run.crew.signal(random, syscall.SIGTERM)
		return nil
	}},
	{name: "worker stopped longer than all patience (SIGSTOP)", weight: 4, inject: func(ctx context.Context, run *run, random *rand.Rand) error {
		m := run.crew.signal(random, syscall.SIGSTOP)
		defer run.crew.resume(m)
		return pause(ctx, patience)
	}},
	{name: "RabbitMQ restarted", weight: 2, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		return run.arena.rabbitmq.Restart(ctx)
	}},
	{name: "RabbitMQ killed and started", weight: 2, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		if err := run.arena.rabbitmq.Kill(); err != nil {
			return err
		}
		if err := run.arena.rabbitmq.Restart(ctx); err != nil {
			return err
		}
		return run.declareMissing()
	}},
	{name: "connections to RabbitMQ cut", weight: 4, inject: func(_ context.Context, run *run, _ *rand.Rand) error {
		run.arena.toRabbitMQ.Cut()
		return nil
	}},
	{name: "RabbitMQ away from the workers", weight: 2, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		run.arena.toRabbitMQ.Down()
		defer run.arena.toRabbitMQ.Up()
		return pause(ctx, hold)
	}},
	// A classic queue: RabbitMQ 3.10.8 leaves a quorum queue without a leader when it is killed within a second of the
	// queue's declaration, and then never confirms what is published to it.
	{name: "queue deleted and declared again", weight: 3, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		queue := audits
		err := run.arena.onChannel(func(channel *amqp091.Channel) error {
			_, err := channel.QueueDelete(queue, false, false, false)
			return err
		})
		if err != nil {
			return err
		}
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
		return run.declareMissing()
	}},
	{name: "PostgreSQL restarted (fast)", weight: 3, postgresql: true, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		return run.arena.postgresql.Restart(ctx)
	}},
	{name: "PostgreSQL killed and started (immediate)", weight: 3, postgresql: true, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		if err := run.arena.postgresql.Kill(); err != nil {
			return err
		}
		return run.arena.postgresql.Restart(ctx)
	}},
	{name: "backends terminated", weight: 4, postgresql: true, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		_, err := run.arena.db.ExecContext(ctx,
			`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, workerName)
		return err
	}},
	{name: "network to PostgreSQL cut", weight: 3, postgresql: true, inject: func(_ context.Context, run *run, _ *rand.Rand) error {
		run.arena.toPostgreSQL.Cut()
		return nil
	}},
	{name: "requests to PostgreSQL lost, then cut", weight: 2, postgresql: true, inject: lose(testproxy.ToServer)},
	{name: "answers of PostgreSQL lost, then cut", weight: 2, postgresql: true, inject: lose(testproxy.ToClient)},
	{name: "network cut in the middle of a row", weight: 3, postgresql: true, inject: cutAnswer("FROM accounts", 100)},
	{name: "network cut after COMMIT was sent", weight: 4, postgresql: true, inject: cutAnswer("COMMIT", 0)},
	{name: "200 ms delay to PostgreSQL", weight: 1, postgresql: true, inject: func(ctx context.Context, run *run, _ *rand.Rand) error {
		run.arena.toPostgreSQL.Delay(200 * time.Millisecond)
		defer run.arena.toPostgreSQL.Delay(0)
		return pause(ctx, hold)
	}},
}

func lose(direction testproxy.Direction) func(context.Context, *run, *rand.Rand) error {
	return func(ctx context.Context, run *run, _ *rand.Rand) error {
		run.arena.toPostgreSQL.Stall(direction)
		defer run.arena.toPostgreSQL.Cut()
		return pause(ctx, hold)
	}
}

func cutAnswer(request string, after int) func(context.Context, *run, *rand.Rand) error {
	return func(ctx context.Context, run *run, random *rand.Rand) error {
		select {
		case <-run.arena.toPostgreSQL.CutAnswer(request, after+random.IntN(after+1)):
			return nil
		case <-time.After(recoveryLimit):
			return fmt.Errorf("no worker has sent %q", request)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// declareMissing is what an operator does, or a consumer at its start.
func (r *run) declareMissing() error {
	queues, err := r.arena.missing()
	if err != nil {
		return err
	}
	if err := r.arena.declare(); err != nil {
		return err
	}
	for _, queue := range queues {
		r.publisher.queueDeleted(queue)
	}
	return nil
}

// draw picks a kind by its weight.
func draw(random *rand.Rand, postgresql bool) fault {
	var possible []fault
	for _, f := range faults {
		if postgresql || !f.postgresql {
			for range f.weight {
				possible = append(possible, f)
			}
		}
	}
	return possible[random.IntN(len(possible))]
}
