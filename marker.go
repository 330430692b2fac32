package inbox

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	markInterval = 100 * time.Millisecond // gathers what was acknowledged meanwhile
	markBackOff  = time.Minute            // the longest pause while marks fail
	markTimeout  = 30 * time.Second       // of one statement
	markBatch    = 100                    // records in one statement
	markPending  = 10_000                 // records kept while marks fail; of the others a copy is sent once more
)

// marker marks stored messages as sent. The router acknowledges a message only after the publisher's nil,
// so the acknowledgement is the proof, and there is no publisher to wrap and none to forget. Marks are
// written in batches, off the path of the messages. A lost mark means one more publish under the same UUIDs.
//
// It has goroutines only while there is something to wait for.
type marker struct {
	repository Repository
	observe    func(context.Context, MarksObservation)
	logger     watermill.LoggerAdapter

	goroutines sync.WaitGroup
	closing    chan struct{} // nothing new; no pauses
	abandoned  context.Context
	abandon    context.CancelFunc

	mutex    sync.Mutex
	closed   bool
	records  []Record // acknowledged and not marked yet
	flushing bool
}

func newMarker(repository Repository, options Options) *marker {
	m := &marker{repository: repository, observe: options.ObserveMarks, logger: options.Logger, closing: make(chan struct{})}
	m.abandoned, m.abandon = context.WithCancel(context.Background())
	return m
}

// await marks the record when the message is acknowledged. The router answers every message whose handler has
// returned. The attempt's context says nothing: Watermill's Timeout ends it before the router publishes.
func (m *marker) await(msg *message.Message, record Record) {
	if isClosed(msg.Acked()) {
		return // by somebody before the router has published: it proves nothing
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.closed {
		return
	}
	m.goroutines.Add(1)
	go func() {
		defer m.goroutines.Done()
		select {
		case <-msg.Acked():
			m.add(record)
		case <-msg.Nacked():
		case <-m.abandoned.Done():
		}
	}()
}

func (m *marker) add(record Record) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.records) == markPending {
		return
	}
	m.records = append(m.records, record)
	if !m.flushing {
		m.flushing = true
		m.goroutines.Add(1)
		go m.flush()
	}
}

// flush writes marks until there is nothing to mark.
func (m *marker) flush() {
	defer m.goroutines.Done()
	wait := markInterval
	for batch := m.next(0, wait); len(batch) > 0; {
		ctx, cancel := context.WithTimeout(m.abandoned, markTimeout)
		err := m.repository.MarkSent(ctx, batch)
		cancel()
		m.report(len(batch), err)
		if err == nil {
			wait = markInterval
			batch = m.next(len(batch), wait)
			continue
		}
		m.logger.Error("Cannot mark messages as sent; copies of them are sent again", err, watermill.LogFields{"records": len(batch)})
		wait = min(2*wait, markBackOff)
		batch = m.next(0, wait)
	}
}

func (m *marker) report(records int, err error) {
	if m.observe == nil {
		return
	}
	m.mutex.Lock()
	pending := len(m.records) - records
	m.mutex.Unlock()
	m.observe(m.abandoned, MarksObservation{Records: records, Pending: pending, Err: err})
}

// next forgets the first records, which are marked, waits, and returns the next batch. When there is none,
// the flush has ended.
func (m *marker) next(marked int, wait time.Duration) []Record {
	m.mutex.Lock()
	m.records = m.records[marked:]
	m.mutex.Unlock()

	closing := m.closing
	if wait > markInterval {
		closing = nil // marks fail: closing does not make them succeed
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-closing:
	case <-m.abandoned.Done():
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.records) == 0 || m.abandoned.Err() != nil {
		m.records, m.flushing = nil, false
		return nil
	}
	return m.records[:min(len(m.records), markBatch)]
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// close lets nothing new in, marks what is acknowledged, and waits for what is not yet, until ctx ends.
func (m *marker) close(ctx context.Context) error {
	m.mutex.Lock()
	if !m.closed {
		m.closed = true
		close(m.closing)
	}
	m.mutex.Unlock()

	done := make(chan struct{})
	go func() {
		defer close(done)
		m.goroutines.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		m.abandon()
		<-done
		return ctx.Err()
	}
}
