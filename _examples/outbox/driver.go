//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

const broker = "broker" // the victim that is no process of ours

// drive makes a stage, plays on it, and reports, also when the play was cut short.
func drive(interrupted context.Context, o options) (err error) {
	ctx, cancel := context.WithTimeoutCause(interrupted, o.timeout, fmt.Errorf("not done within %s", o.timeout))
	defer cancel()
	fmt.Printf("seed %d\n", o.seed)
	s, err := newStage(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.remove()) }()

	d := &driver{options: o, stage: s, crew: newCrew(s, o.verbose), random: rand.New(rand.NewPCG(o.seed, 0)), began: time.Now()}
	d.killed = make(map[string]int)
	played := d.play(ctx)
	d.crew.killAll()
	if interrupted.Err() != nil {
		return errors.New("interrupted: orders were still on their way, so nothing is counted")
	}
	result, err := d.collect()
	if err != nil {
		return errors.Join(played, err)
	}
	if played != nil {
		d.crew.tally.printErrors(os.Stderr)
	}
	if !result.print(os.Stdout) || played != nil {
		return errors.Join(played, errors.New("the chain is not complete, or not once"))
	}
	return nil
}

// driver is the story.
type driver struct {
	options
	*stage
	crew     *crew
	producer *producer
	random   *rand.Rand
	killed   map[string]int // victims, by role
	began    time.Time
}

func (d *driver) say(format string, args ...any) {
	fmt.Printf("%6.2f s  %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}

// play is what happens, in its order.
func (d *driver) play(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	d.crew.fail = fail

	// Against the stream, since RabbitMQ drops what no queue is bound to.
	for _, role := range []string{"invoices", "forwarder", "orders"} {
		if err := d.crew.startRole(ctx, role); err != nil {
			return err
		}
	}
	declared := time.Now()
	d.say("started: %s", d.crew.names())

	var err error
	if d.producer, err = newProducer(d.settings, d.orders, d.copies, d.seed); err != nil {
		return err
	}
	defer d.producer.close()
	published := make(chan error, 1)
	go func() { published <- d.producer.run(ctx) }()
	d.say("publishing %d orders, %d times each, shuffled", d.orders, d.copies)

	// Each kill comes with a portion of the orders, so that it finds the chain at work.
	victims := d.victims()
	for i, victim := range victims {
		if victim == broker {
			// A durable queue that was declared just before a crash may be gone after it (RabbitMQ 3.10), and
			// what is published to it is then confirmed and dropped. Deployments declare queues long before.
			if err := pause(ctx, time.Until(declared.Add(5*time.Second))); err != nil {
				return err
			}
		}
		d.producer.release(i+1, len(victims)+1)
		if err := d.kill(ctx, victim); err != nil {
			return err
		}
	}
	d.producer.release(1, 1)
	if err := <-published; err != nil {
		return fmt.Errorf("publishing: %w", err)
	}
	d.say("all orders published")

	for _, role := range []string{"orders", "forwarder", "invoices"} {
		if err := d.drain(ctx, role); err != nil {
			return err
		}
	}
	d.say("drained, all processes stopped")
	return nil
}

// victims is whom to kill, in a random order.
func (d *driver) victims() []string {
	var victims []string
	for i := range d.kills {
		victims = append(victims, roles[i%len(roles)].name)
	}
	if d.ownBroker == nil {
		d.say("the broker was given by its address and is not killed")
	} else {
		for range d.brokerKills {
			victims = append(victims, broker)
		}
	}
	d.random.Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
	return victims
}

func (d *driver) kill(ctx context.Context, victim string) error {
	d.killed[victim]++
	if victim == broker {
		return d.killBroker(ctx)
	}
	m := d.crew.pick(victim, d.random)
	delay := time.Duration(d.random.Int64N(int64(5 * time.Millisecond)))
	at := fmt.Sprintf("%.1f ms into a message", delay.Seconds()*1000)
	if !m.waitForWork(ctx) {
		at = "with nothing to do"
	}
	if err := pause(ctx, delay); err != nil {
		return err
	}
	m.kill()
	if err := d.crew.start(ctx, m.role, m.number); err != nil {
		return err
	}
	d.say("%s killed (SIGKILL) %s, started again", m, at)
	return nil
}

// killBroker kills it while publishes are without a confirm: nobody knows whether they are stored, so they
// are repeated.
func (d *driver) killBroker(ctx context.Context) error {
	if err := pause(ctx, time.Duration(d.random.Int64N(int64(50*time.Millisecond)))); err != nil {
		return err
	}
	waiting := d.producer.waitForPublish(ctx)
	if err := d.ownBroker.Kill(); err != nil {
		return err
	}
	d.say("broker killed (SIGKILL) while %d orders waited for their confirm", waiting)
	if err := d.ownBroker.Restart(ctx); err != nil {
		return err
	}
	d.say("broker started again")
	return nil
}

// drain lets a role do what there is to do and stops it. Messages in flight are not in a queue and come
// back when their consumer stops, so it looks again after that.
func (d *driver) drain(ctx context.Context, role string) error {
	for {
		if err := d.waitUntilIdle(ctx, role); err != nil {
			return err
		}
		if err := d.crew.stopRole(role); err != nil {
			return err
		}
		if left, err := d.left(ctx, role); left == 0 || err != nil {
			return err
		}
		if err := d.crew.startRole(ctx, role); err != nil {
			return err
		}
	}
}

// waitUntilIdle waits until nothing is pending and the role has been silent since that was seen before.
func (d *driver) waitUntilIdle(ctx context.Context, role string) error {
	said := -1
	for {
		left, err := d.pending(ctx, role)
		if err != nil {
			return err
		}
		lines := d.crew.tally.lines(role)
		if left == 0 && lines == said {
			return nil
		}
		said = lines
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
