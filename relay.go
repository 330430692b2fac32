package inbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/devmappa/watermill-inbox/internal/interval"
)

// Relay publishes what is committed and still unsent after some minutes, even if the input never comes again: the
// broker dropped it, or the process died between the publish and the mark. Without a Relay only a copy of the input
// publishes them. Any number of instances may run one; each record is leased to one of them at a time. Nothing is open
// in the database while it publishes. Messages keep their UUIDs, and may be published more than once. Their order is not
// kept.
type Relay struct {
	repository RelayRepository
	options    RelayOptions
}

// RelayRepository is what a [Relay] needs.
type RelayRepository interface {
	Repository
	Records
}

// RelayPass is what one pass over one consumer did, in numbers of records.
type RelayPass struct {
	// Published are the records whose messages were published.
	Published int

	// Unreadable are skipped: a newer version of this module stored their messages, or they are damaged. [ListUnsent]
	// lists them.
	Unreadable int

	// GivenUp are skipped: they are older than RelayOptions.GiveUp.
	GivenUp int
}

// RelayObservation is what became of a pass over one consumer. See [RelayOptions].Observe.
type RelayObservation struct {
	RelayPass

	Consumer string

	// Err is why the pass ended early; nil when it did not.
	Err error
}

// NewRelay returns a relay. It starts nothing.
func NewRelay(repository RelayRepository, options RelayOptions) (*Relay, error) {
	if repository == nil {
		return nil, errors.New("inbox: repository is nil")
	}
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.Publishers = maps.Clone(options.Publishers)
	options.setDefaults()
	return &Relay{repository: repository, options: options}, nil
}

// relayGrace is how long Run waits for publishers after its context has ended.
const relayGrace = 5 * time.Second

// Run makes a pass over each consumer at once and then one per interval, each consumer in a goroutine of its own, so that
// a publisher that hangs holds up only its own consumer. It ends with the context and returns the context's error, and
// says so if a publisher has not returned five seconds later.
func (r *Relay) Run(ctx context.Context) error {
	var group sync.WaitGroup
	for consumer := range r.options.Publishers {
		group.Add(1)
		go func() {
			defer group.Done()
			for ctx.Err() == nil {
				wait := r.options.Interval
				if _, err := r.Pass(ctx, consumer); err != nil {
					wait = min(wait, failedPassPause)
				}
				_ = interval.Wait(ctx, wait)
			}
		}()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		group.Wait()
	}()
	<-ctx.Done()
	select {
	case <-done:
		return ctx.Err()
	case <-time.After(relayGrace):
		return fmt.Errorf("inbox: a publisher of the relay has not returned: %w", ctx.Err())
	}
}

// Pass publishes what is unsent of one consumer. It ends at the first error of the publisher, which is probably away; the
// rest of what it has leased waits for the lease's end. The pass is returned as far as it came, also with an error.
func (r *Relay) Pass(ctx context.Context, consumer string) (RelayPass, error) {
	var pass RelayPass
	err := r.pass(ctx, consumer, &pass)
	fields := watermill.LogFields{"consumer": consumer, "published": pass.Published, "unreadable": pass.Unreadable, "given_up": pass.GivenUp}
	switch {
	case ctx.Err() != nil:
	case err != nil:
		r.options.Logger.Error("Inbox relay pass failed", err, fields)
	case pass.Unreadable+pass.GivenUp > 0:
		r.options.Logger.Error("Inbox relay has left messages that are not published", nil, fields)
	case pass.Published > 0:
		r.options.Logger.Info("Inbox relay pass done", fields)
	}
	if r.options.Observe != nil {
		r.options.Observe(ctx, RelayObservation{RelayPass: pass, Consumer: consumer, Err: err})
	}
	return pass, err
}

func (r *Relay) pass(ctx context.Context, consumer string, pass *RelayPass) (err error) {
	publisher, ok := r.options.Publishers[consumer]
	if !ok {
		return fmt.Errorf("inbox: the relay has no publisher for consumer %q", consumer)
	}
	err = r.publishUnsent(ctx, publisher, consumer, pass)
	if r.options.GiveUp > 0 && ctx.Err() == nil { // last, so that what cannot be counted keeps nothing from being published
		var countErr error
		pass.GivenUp, countErr = r.repository.CountRecords(ctx, Selection{Consumer: consumer, Unsent: true, OlderThan: r.options.GiveUp})
		err = errors.Join(err, countErr)
	}
	return err
}

func (r *Relay) publishUnsent(ctx context.Context, publisher message.Publisher, consumer string, pass *RelayPass) error {
	selection := Selection{Consumer: consumer, Unsent: true, OlderThan: r.options.Age, NotOlderThan: r.options.GiveUp}
	for after := (Record{}); ; {
		leased, err := r.repository.LeaseUnsent(ctx, selection, after, r.options.BatchSize, r.options.Lease)
		if err != nil || len(leased) == 0 {
			return err
		}
		var sent []Record
		for _, record := range leased {
			if err = ctx.Err(); err != nil {
				break
			}
			var unreadable bool
			if unreadable, err = r.publish(ctx, publisher, record); err != nil {
				break
			}
			if unreadable {
				pass.Unreadable++
				continue
			}
			pass.Published++
			sent = append(sent, record)
		}
		// Also after an error, and in a context that lives: they are published.
		mark, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout)
		_, markErr := r.repository.MarkSent(mark, sent)
		cancel()
		if err := errors.Join(err, markErr); err != nil {
			return err
		}
		after = leased[len(leased)-1]
	}
}

func (r *Relay) publish(ctx context.Context, publisher message.Publisher, record Record) (unreadable bool, err error) {
	messages, err := decodeProduced(record.Produced)
	if err != nil {
		return true, nil
	}
	for _, msg := range messages {
		msg.SetContext(ctx)
	}
	if err := publisher.Publish(record.Topic, messages...); err != nil {
		return false, fmt.Errorf("inbox: cannot publish the stored messages of %s: %w", record.Key, err)
	}
	return false, nil
}
