package inbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/devmappa/watermill-inbox/internal/interval"
)

// ErrNotPublished is in an observation of [Options].ObservePublish: the input was acknowledged, and the messages that
// its handler returned were not published in between. A middleware outside of the inbox drops or replaces them or
// acknowledges by itself, the poison queue took the input after its handler had succeeded, or the router lacks
// [Middleware.DecoratePublisher]. The messages stay stored; a [Relay] publishes them.
var ErrNotPublished = errors.New("the message was acknowledged, but what its handler returned was not published")

// PublishObservation is what became of the messages that a handler returned. See [Options].ObservePublish.
type PublishObservation struct {
	// Key is that of the message whose handler returned them.
	Key Key

	// Tries is how often the publisher was called; 0 with ErrNotPublished.
	Tries int

	// Duration is how long that took in all, with the pauses.
	Duration time.Duration

	// Err is nil when they were published.
	Err error
}

// DecoratePublisher is a publisher decorator for the router: router.AddPublisherDecorators(once.DecoratePublisher), as the
// first one, which in Watermill 1.5 is the outermost. [Middleware.AddTo] adds it.
//
// It knows the messages that handlers behind this middleware returned, by the handler's name and their UUIDs. The
// publisher's nil, which must mean "stored", is the proof that they are sent; without it their record stays unsent. An
// error makes it try again, with pauses, until Options.PublishBackOff is over or the delivery's context ends: no
// transaction is open meanwhile, and no delivery is used up. All other messages pass through.
func (m *Middleware) DecoratePublisher(publisher message.Publisher) (message.Publisher, error) {
	if publisher == nil {
		return nil, nil // a handler without one
	}
	return &provingPublisher{publisher, m}, nil
}

type provingPublisher struct {
	message.Publisher
	middleware *Middleware
}

// The pauses between two tries to publish, each twice the one before.
const (
	firstPublishPause = 50 * time.Millisecond
	lastPublishPause  = 2 * time.Second
)

// Publish implements message.Publisher.
func (p *provingPublisher) Publish(topic string, messages ...*message.Message) error {
	// Before the publisher is called, which may change the messages.
	proofs := p.middleware.expectations.match(messages)
	if len(proofs) == 0 {
		return p.Publisher.Publish(topic, messages...)
	}
	expected, started, options := proofs[0].expectation, time.Now(), p.middleware.options
	ctx, cancel := context.WithTimeout(expected.ctx, options.PublishBackOff)
	defer cancel()
	observation := PublishObservation{Key: expected.record.Key}
	for pause := firstPublishPause; ; pause = min(2*pause, lastPublishPause) {
		observation.Tries++
		observation.Err = p.Publisher.Publish(topic, messages...)
		if observation.Err == nil || isPermanent(observation.Err) {
			break
		}
		if observation.Tries == 1 {
			options.Logger.Error("Publishing failed, trying again", observation.Err, watermill.LogFields{
				"handler_name": expected.handler, "topic": topic, "consumer": expected.record.Key.Consumer, "message_id": expected.record.Key.MessageID,
			})
		}
		if interval.Wait(ctx, pause) != nil {
			break
		}
	}
	if observation.Err == nil {
		p.middleware.marker.add(p.middleware.expectations.proven(proofs))
	}
	observation.Duration = time.Since(started)
	if options.ObservePublish != nil {
		options.ObservePublish(expected.ctx, observation)
	}
	return observation.Err
}

// expectation are the messages of one attempt that the router has been given and has not published yet.
type expectation struct {
	handler  string
	record   Record
	ctx      context.Context // the delivery's
	messages []*message.Message
	uuids    []string        // of the messages, which may change
	missing  map[string]bool // UUIDs
}

// expectations are those of all messages that are not answered yet.
type expectations struct {
	mutex sync.Mutex
	all   map[publication][]*expectation
}

// publication names a message that is about to be published. Two handlers may publish the same UUID.
type publication struct{ handler, uuid string }

func (e *expectations) add(expected *expectation) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.all == nil {
		e.all = map[publication][]*expectation{}
	}
	for uuid := range expected.missing {
		name := publication{expected.handler, uuid}
		e.all[name] = append(e.all[name], expected)
	}
}

// remove forgets an expectation and reports whether it was fulfilled.
func (e *expectations) remove(expected *expectation) bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	for _, uuid := range expected.uuids {
		name := publication{expected.handler, uuid}
		if rest := slices.DeleteFunc(e.all[name], func(other *expectation) bool { return other == expected }); len(rest) > 0 {
			e.all[name] = rest
		} else {
			delete(e.all, name)
		}
	}
	return len(expected.missing) == 0
}

// proof is a message that an expectation waits for.
type proof struct {
	*expectation
	uuid string
}

// match returns what the publishing of these messages proves. Several attempts may expect a UUID: copies of one
// message, all of which it proves; or attempts of different messages, of which it proves only the one whose very
// message this is, since what is published is not the others'.
func (e *expectations) match(messages []*message.Message) []proof {
	var proofs []proof
	for _, msg := range messages {
		e.mutex.Lock()
		candidates := slices.Clone(e.all[publication{message.HandlerNameFromCtx(msg.Context()), msg.UUID}])
		e.mutex.Unlock()
		same := func(other *expectation) bool { return other.record.Compare(candidates[0].record) == 0 }
		if len(candidates) > 1 && slices.ContainsFunc(candidates, func(other *expectation) bool { return !same(other) }) {
			candidates = slices.DeleteFunc(candidates, func(other *expectation) bool { return !slices.Contains(other.messages, msg) })
		}
		for _, candidate := range candidates {
			proofs = append(proofs, proof{candidate, msg.UUID})
		}
	}
	return proofs
}

// proven returns the records all of whose messages are published.
func (e *expectations) proven(proofs []proof) (records []Record) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	for _, proof := range proofs {
		if !proof.missing[proof.uuid] {
			continue
		}
		delete(proof.missing, proof.uuid)
		if len(proof.missing) == 0 && !slices.ContainsFunc(records, func(r Record) bool { return r.Compare(proof.record) == 0 }) {
			records = append(records, proof.record)
		}
	}
	return records
}

// expect waits for the publishing of what the attempt returns, until the message is answered. The router answers every
// message whose handler has returned.
func (a *attempt) expect(processedAt time.Time, produced []*message.Message) {
	expected := &expectation{
		handler: message.HandlerNameFromCtx(a.outer), record: Record{Key: a.inner.key, ProcessedAt: processedAt},
		ctx: context.WithoutCancel(a.outer), messages: slices.Clone(produced), missing: map[string]bool{},
	}
	if a.delivery != &a.own {
		expected.ctx = a.delivery.ctx
	}
	for _, msg := range produced {
		expected.uuids = append(expected.uuids, msg.UUID)
		expected.missing[msg.UUID] = true
	}
	if !a.marker.begin() {
		return // it is closed
	}
	a.expectations.add(expected)
	go func() {
		defer a.marker.end()
		acked := false
		select {
		case <-a.msg.Acked():
			acked = true
		case <-a.msg.Nacked():
		case <-a.marker.abandoned.Done():
		}
		if fulfilled := a.expectations.remove(expected); acked && !fulfilled {
			a.reportNotPublished(expected)
		}
	}()
}

func (a *attempt) reportNotPublished(expected *expectation) {
	if _, said := a.notPublished.LoadOrStore(expected.handler, true); !said {
		a.options.Logger.Error("Messages are acknowledged without a publish of what their handler returned; this is logged once for the handler", ErrNotPublished,
			watermill.LogFields{"handler_name": expected.handler, "consumer": expected.record.Key.Consumer, "message_id": expected.record.Key.MessageID})
	}
	if a.options.ObservePublish != nil {
		a.options.ObservePublish(expected.ctx, PublishObservation{Key: expected.record.Key, Err: ErrNotPublished})
	}
}
